# SPDX-License-Identifier: Apache-2.0
"""gpu_evidence.py's options, each with its remedy, and docs/gpu.md, which explains them."""

import re

import pytest

import gpu_evidence
from evidence import plan


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder that has all that an option can name."""
    for folder in ("site/vllm", "model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "good.jsonl").write_text('{"timestamp": 0, "input_length": 0, "hash_ids": []}\n')
    (tmp_path / "bad.jsonl").write_text("[]\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def usage(capsys):
    """usage(*arguments): what is said about arguments that cannot be run with."""

    def said(*arguments):
        with pytest.raises(SystemExit) as stopped:
            gpu_evidence.main([*arguments])
        assert stopped.value.code == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "usage: " in shown.err
        return shown.err

    return said


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("--site site --model model --trace good.jsonl", "required: --out"),
        (
            "--out o --site site --parts drill,drlil --model model",
            "drlil: choose from smoke, drill",
        ),
        ("--out o --site absent --model model", "--site absent: name the folder that holds"),
        ("--out o --site model --model model", "--site model: name the folder that holds"),
        ("--out o --site site --trace good.jsonl", "--model is missing: name a folder with Qwen3"),
        ("--out o --site site --model absent", "--model absent: there is no config.json"),
        ("--out o --site site --model model", "--trace is missing: name a trace, or leave `trace`"),
        ("--out o --site site --rehearse", "--trace is missing: name a trace, or leave `trace`"),
        ("--out o --site site --rehearse --parts agents", "or leave `agents` out of --parts"),
        ("--out o --site site --model model --trace bad.jsonl", "bad.jsonl:1: expected an object"),
        ("--out o --site site --model model --trace absent", "absent: No such file"),
    ],
)
def test_bad_usage_exits_2_with_the_remedy(arguments, remedy, usage):
    assert remedy in usage(*arguments.split())


def test_without_vllm_and_without_a_site_the_remedy_is_named(usage, monkeypatch):
    monkeypatch.setattr(gpu_evidence.importlib.util, "find_spec", lambda name: None)
    assert "name the folder that holds the vllm package" in usage("--out", "o", "--model", "model")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--parts dp2", ["dp2"]),  # a CPU is enough
        ("--rehearse --parts smoke,drill", ["smoke", "drill"]),
        ("--model model --trace good.jsonl", gpu_evidence.DEFAULT_PARTS.split(",")),
        ("--model model --parts ttft", ["ttft"]),
    ],
)
def test_what_is_asked_for_is_all_that_is_needed(arguments, parts):
    assert gpu_evidence.parse(["--out", "o", "--site", "site", *arguments.split()])[1] == parts


def test_the_site_is_what_this_python_imports(script, tmp_path):
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("")
    done = script(
        "gpu_evidence.py",
        *("--out", tmp_path / "out", "--state", tmp_path / "state", "--parts", "dp2"),
        PYTHONPATH=str(tmp_path / "site"),
    )
    # It is taken, and the installer refuses it: it is no vLLM 0.32.0.
    assert done.returncode == 2
    assert "gpu_evidence: " in done.stderr
    assert "install_computecache.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state" / "site_unpatched" / "vllm").exists()


DOCUMENT = (gpu_evidence.REPO / "docs" / "gpu.md").read_text()


def test_the_document_has_the_parts_in_order_and_their_seconds():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| \S", DOCUMENT, re.MULTILINE)
    planned = [(name, int(seconds)) for name, seconds in rows]
    assert planned == list(plan.GPU.planned_s)
    assert [name for name, _ in planned] == list(gpu_evidence.PARTS)
    first = gpu_evidence.DEFAULT_PARTS.split(",")
    assert [name for name, _ in planned][: len(first)] == first
    most = sum(seconds for name, seconds in planned if name in first)
    assert len(first) == 7
    assert f"the first seven run: {most:,} seconds" in DOCUMENT


def test_the_documents_numbers_are_the_codes():
    options, _ = gpu_evidence.parse(["--out", "o", "--rehearse", "--parts", "smoke"])
    for text in (
        f"take at most {plan.GPU.budget_gib:.0f} GiB",
        f"from {options.first_port} on",
        f"`--deadline-s` ({options.deadline_s:.0f} without it)",
        f"`--state` (`{options.state.relative_to(gpu_evidence.REPO)}` in the checkout)",
    ):
        assert text in " ".join(DOCUMENT.split())


def test_every_option_that_the_document_names_is_there(capsys):
    with pytest.raises(SystemExit):
        gpu_evidence.main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    # Those of pip, of the installer and of gpu_report.py.
    others = {"--group", "--revert", "--results", "--page", "--check", "--short"}
    assert set(re.findall(r"--[a-z][a-z-]+", DOCUMENT)) - others <= known
