# SPDX-License-Identifier: Apache-2.0
"""scripts/check_env.py: every fault is named, and what it accepts is read alike everywhere."""

import json
import os
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from unittest.mock import ANY

import pytest
import yaml
from dotenv import dotenv_values
from hypothesis import given, settings
from hypothesis import strategies as st

import check_env
import install_computecache as installer
from lab.modules import load_module

REPO = Path(__file__).parents[2]
policy_module = load_module("policy_of_the_check", REPO / "vllm/v1/core/computecache_policy.py")
COMPOSE = Path(sys.executable).with_name("docker-compose")  # of the test group
KEY = "8c5f6a1e0b7d4c39a2e1f0d6b5c4a392"
PASSWORD = "1f2e3d4c5b6a79880716253443526170"
GOOD = f"VLLM_API_KEY={KEY}\nGRAFANA_ADMIN_PASSWORD={PASSWORD}\nCOMPUTECACHE_MODE=active\n"


def run(path: Path, **environ: str) -> tuple[int, dict, str]:
    """The script in a process of its own, with no exported setting but `environ`."""
    result = subprocess.run(
        [sys.executable, "-S", REPO / "scripts/check_env.py", "--env-file", path],
        env={"PATH": os.environ["PATH"]} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, json.loads(result.stdout or "{}"), result.stderr


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / ".env"
    path.write_bytes(text.encode())
    path.chmod(0o600)
    return path


def connector(policy: str = "recompute", **extra: object) -> str:
    """The line of .env for a connector with these settings."""
    config = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    return f"KV_TRANSFER_CONFIG='{json.dumps(config)}'\n"


BAD = {
    "API key blank": (GOOD.replace(KEY, ""), "VLLM_API_KEY is blank or missing"),
    "API key missing": (GOOD.replace("VLLM_API_KEY", "#"), "VLLM_API_KEY is blank or missing"),
    "API key placeholder": (GOOD.replace(KEY, "changeme-please-now"), "VLLM_API_KEY is still a"),
    "password placeholder": (GOOD.replace(PASSWORD, "admin"), "GRAFANA_ADMIN_PASSWORD is still a"),
    "API key short": (GOOD.replace(KEY, "8c5f6a1e"), "VLLM_API_KEY has fewer than 16"),
    "equal secrets": (GOOD.replace(PASSWORD, KEY), "are equal"),
    "CRLF": (GOOD.replace("\n", "\r\n"), "CRLF line ends"),
    "byte order mark": ("\ufeff" + GOOD, "line 1: the file starts with a byte order mark"),
    "escaping quotes": (
        GOOD.replace("=active", '="act\\"ive"'),
        "line 3: COMPUTECACHE_MODE: a backslash, which Compose and a shell read differently",
    ),
    "unbalanced quote": (
        GOOD.replace("=active", "='active"),
        "line 3: COMPUTECACHE_MODE: quotes that Compose and a shell read differently",
    ),
    "dollar in a secret": (GOOD.replace(KEY, "8c5f$6a1e0b7d4c39"), "line 1: VLLM_API_KEY: `$`"),
    "trailing comment": (
        GOOD.replace("active", "lru # for now"),
        "line 3: COMPUTECACHE_MODE: comment behind the value",
    ),
    "space before =": (
        GOOD.replace("MODE=", "MODE ="),
        "line 3: COMPUTECACHE_MODE: space before `=`",
    ),
    "space after =": (GOOD.replace("MODE=", "MODE= "), "COMPUTECACHE_MODE: space around"),
    "export": (GOOD.replace("COMPUTECACHE", "export COMPUTECACHE"), "line 3: starts with `export`"),
    "no assignment": (GOOD + "active\n", "line 4: is not NAME=value"),
    "set twice": (GOOD + "COMPUTECACHE_MODE=lru\n", "line 4: COMPUTECACHE_MODE is set twice"),
    "unknown mode": (GOOD.replace("active", "on"), "COMPUTECACHE_MODE='on' must be lru or active"),
    "mode in upper case": (GOOD.replace("active", "Active"), "COMPUTECACHE_MODE='Active' must be"),
    "scan limit 0": (
        GOOD + "COMPUTECACHE_SCAN_LIMIT=0\n",
        "COMPUTECACHE_SCAN_LIMIT='0' must be a whole number from 1 to 4096",
    ),
    "scan limit 4097": (GOOD + "COMPUTECACHE_SCAN_LIMIT=4097\n", "SCAN_LIMIT='4097' must be"),
    "negative weight": (GOOD + "COMPUTECACHE_AGE_WEIGHT=-1\n", "COMPUTECACHE_AGE_WEIGHT='-1' must"),
    "fraction for a weight": (GOOD + "COMPUTECACHE_REUSE_WEIGHT=1.5\n", "WEIGHT='1.5' must be"),
    "blank setting": (GOOD + "COMPUTECACHE_LOG_EVERY=\n", "COMPUTECACHE_LOG_EVERY='' is blank"),
    "misspelt setting": (
        GOOD + "COMPUTECACHE_SCANLIMIT=64\n",
        "COMPUTECACHE_SCANLIMIT='64' is no setting",
    ),
    "port out of range": (GOOD + "API_PORT=80000\n", "API_PORT='80000' must be a whole number"),
    "retention without a unit": (
        GOOD + "PROMETHEUS_RETENTION=15\n",
        "PROMETHEUS_RETENTION='15' must be a time that Prometheus reads",
    ),
    "retention in the wrong order": (GOOD + "PROMETHEUS_RETENTION=2d1w\n", "RETENTION='2d1w' must"),
    "retention of nothing": (GOOD + "PROMETHEUS_RETENTION=0d\n", "RETENTION='0d' must be a time"),
    "equal ports": (GOOD + "API_PORT=3001\nGRAFANA_PORT=3001\n", "API_PORT and GRAFANA_PORT are"),
    "a default port": (GOOD + "API_PORT=9090\n", "API_PORT and PROMETHEUS_PORT are both 9090"),
    "longer than the pool": (
        GOOD + "MAX_MODEL_LEN=2033\n",
        "MAX_MODEL_LEN=2033 is more than the 2032 tokens of (NUM_GPU_BLOCKS=128 - 1) x BLOCK_SIZE",
    ),
    "another Compose file": (
        GOOD + "COMPOSE_FILE=other.yaml\n",
        "COMPOSE_FILE='other.yaml' is obeyed by Compose, but other.yaml is not there",
    ),
    "connector no JSON": (GOOD + "KV_TRANSFER_CONFIG={}\n", "a shell treats specially"),
    "connector unnamed": (
        GOOD + 'KV_TRANSFER_CONFIG=\'{"kv_role":"kv_both"}\'\n',
        "must be a JSON object with a kv_connector, in single quotes in .env",
    ),
    "connector lazy": (
        GOOD + connector(lazy_offload=True),
        "SimpleCPUOffloadConnector stores lazily",
    ),
    "vLLM unknown": (GOOD + "VLLM_VERSION=0.25.1\n", "='0.25.1' must be 0.32.0 or 0.33.0"),
    "memory above 1": (GOOD + "GPU_MEMORY_UTILIZATION=90\n", "UTILIZATION='90' must be above 0"),
}


@pytest.mark.parametrize(("text", "fault"), BAD.values(), ids=BAD.keys())
def test_bad_file_is_refused_for_its_one_fault(tmp_path, text, fault):
    code, report, stderr = run(write(tmp_path, text))
    assert code == 1
    assert not report["accepted"]
    assert [fault in found for found in report["faults"]] == [True]
    assert fault in stderr


def test_good_file_is_accepted(tmp_path):
    code, report, stderr = run(write(tmp_path, GOOD))
    assert (code, report["faults"], report["warnings"], stderr) == (0, [], [], "")


def test_a_connector_that_stores_eagerly_is_accepted_and_one_that_fails_requests_is_said(tmp_path):
    for line in (connector(), connector(lazy_offload=False), connector(connectors=[1, {}])):
        assert run(write(tmp_path, GOOD + line))[:2] == (0, ANY)
    _, report, _ = run(write(tmp_path, GOOD + connector("fail")))
    assert [warning.split(":")[0] for warning in report["warnings"]] == [
        "KV_TRANSFER_CONFIG without kv_load_failure_policy recompute"
    ]
    lru = GOOD.replace("=active", "=lru") + connector(lazy_offload=True)
    assert run(write(tmp_path, lru))[0] == 0


def test_the_vllm_releases_are_those_of_the_installer():
    assert tuple(installer.RELEASES) == check_env.VLLM_VERSIONS


def test_lazy_connectors_are_those_that_the_policy_steps_aside_for():
    lazy = {"lmcache.mp.lazy_offload": True}
    inner = [{"kv_connector": "B", "kv_connector_extra_config": lazy}, {"kv_connector": "C"}]
    for extra in ({}, lazy, {"lazy_offload": 1}, {"connectors": inner}, {"lazy_offload": False}):
        config = {"kv_connector": "A", "kv_connector_extra_config": extra}
        assert check_env.lazy_connector(config) == policy_module.lazy_connector("A", extra)
    assert policy_module.lazy_connector("A", {"connectors": inner}) == "B"


def test_the_example_is_good_but_for_its_two_placeholders(tmp_path):
    example = (REPO / ".env.example").read_text()
    code, report, _ = run(write(tmp_path, example))
    assert code == 1
    assert [fault.split(":")[0] for fault in report["faults"]] == [
        "VLLM_API_KEY is still a placeholder",
        "GRAFANA_ADMIN_PASSWORD is still a placeholder",
    ]


def test_every_optional_line_of_the_example_is_accepted_when_uncommented(tmp_path):
    example = (REPO / ".env.example").read_text()
    lines = [line.removeprefix("#") for line in example.splitlines() if "=" in line]
    text = "\n".join(line for line in lines if " " not in line)
    text = text.replace("replace-me-with-a-random-key", KEY)
    text = text.replace("replace-me-with-another-random-key", PASSWORD)
    code, report, _ = run(write(tmp_path, text))
    assert (code, report["faults"], report["warnings"]) == (0, [], [])
    assert {line.partition("=")[0] for line in text.splitlines()} == check_env.KNOWN - {
        "SOURCE_REVISION"
    }


def test_missing_file_says_how_to_start(tmp_path):
    code, report, stderr = run(tmp_path / ".env")
    assert (code, report) == (2, {})
    assert "cp .env.example .env" in stderr


def test_exported_variable_that_overrides_the_file_is_refused(tmp_path):
    """The documented `check_env && docker compose up -d` must not go on in another mode."""
    path = write(tmp_path, GOOD.replace("active", "lru"))
    code, report, stderr = run(path, COMPUTECACHE_MODE="active", API_PORT="8100")
    assert code == 1
    assert report["faults"] == [
        "API_PORT is exported in this shell and overrides the default: `unset API_PORT`",
        "COMPUTECACHE_MODE is exported in this shell and overrides its value in .env: "
        "`unset COMPUTECACHE_MODE`",
    ]
    assert all(fault in stderr for fault in report["faults"])


def test_exported_variable_that_changes_nothing_is_accepted(tmp_path):
    path = write(tmp_path, GOOD + "COMPOSE_PROJECT_NAME=mine\n")
    same = {"COMPUTECACHE_MODE": "active", "COMPOSE_PROJECT_NAME": "mine"}
    assert run(path, **same, SOURCE_REVISION="0123")[0] == 0


@pytest.mark.parametrize("name", ["COMPOSE_FILE", "COMPOSE_ENV_FILES", "COMPOSE_PROJECT_NAME"])
def test_exported_variable_of_compose_itself_is_refused(tmp_path, name):
    code, report, _ = run(write(tmp_path, GOOD), **{name: "other"})
    assert code == 1
    (fault,) = report["faults"]
    assert fault.startswith(f"{name} is exported in this shell, and Compose then ")
    assert fault.endswith(f": `unset {name}`")


def test_compose_files_that_are_there_and_begin_with_ours_are_obeyed_and_said(tmp_path):
    path = write(tmp_path, GOOD + "COMPOSE_FILE=compose.yaml:compose.cpu.yaml\n")
    (tmp_path / "compose.cpu.yaml").touch()
    assert run(path)[0] == 1
    shutil.copytree(REPO / "monitoring", tmp_path / "monitoring")
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    (tmp_path / "compose.yaml").touch()
    code, report, _ = run(path)
    assert (code, report["faults"]) == (0, [])
    assert report["warnings"] == [
        f"COMPOSE_FILE in {path} is obeyed by Compose: it starts other files than compose.yaml"
    ]


def test_the_pool_of_the_stack_without_a_gpu_has_blocks_of_32_tokens(tmp_path):
    """Whatever BLOCK_SIZE says; 64 blocks of 16 tokens would be too few for the default length."""
    text = GOOD + "NUM_GPU_BLOCKS=64\nBLOCK_SIZE=16\n"
    (tmp_path / "compose.cpu.yaml").touch()
    assert "1008 tokens" in run(write(tmp_path, text))[1]["faults"][0]
    text += "COMPOSE_FILE=compose.yaml:compose.cpu.yaml\n"
    path = write(tmp_path, text)
    for name in ("monitoring", "scripts"):
        shutil.copytree(REPO / name, tmp_path / name)
    (tmp_path / "compose.yaml").touch()
    assert run(path)[0] == 0
    assert "2016 tokens" in run(write(tmp_path, text + "MAX_MODEL_LEN=2017\n"))[1]["faults"][0]


def test_files_that_a_container_could_not_read_are_refused_with_the_command(tmp_path):
    path = write(tmp_path, GOOD)
    for name in ("monitoring", "scripts"):
        shutil.copytree(REPO / name, tmp_path / name)
    (tmp_path / "compose.yaml").touch()
    (tmp_path / "monitoring/alerts.yml").chmod(0o600)
    (tmp_path / "monitoring/grafana/provisioning/dashboards").chmod(0o700)
    code, report, _ = run(path)
    names = "monitoring/alerts.yml monitoring/grafana/provisioning"
    assert (code, report["faults"]) == (
        1,
        [f"the containers' users cannot read {names}: `chmod -R a+rX {names}`"],
    )
    subprocess.run(["chmod", "-R", "a+rX", *names.split()], cwd=tmp_path, check=True)
    assert run(path)[0] == 0
    (tmp_path / "monitoring/alerts.yml").unlink()
    assert "monitoring/alerts.yml is missing" in run(path)[1]["faults"][0]


def test_readable_file_and_unused_name_are_warnings(tmp_path):
    path = write(tmp_path, GOOD + "VLLM_APIKEY=x\n")
    path.chmod(0o644)
    code, report, _ = run(path)
    assert code == 0
    assert report["warnings"] == [
        "VLLM_APIKEY is not used by compose.yaml",
        f"other users can read {path}: chmod 600 {path}",
    ]


@pytest.mark.parametrize("text", [text for text, _ in BAD.values()], ids=BAD.keys())
def test_secrets_are_never_printed(tmp_path, text):
    code, report, stderr = run(write(tmp_path, text), VLLM_API_KEY="exported-secret-value")
    assert code == 1
    for secret in (KEY, PASSWORD, "8c5f", "changeme-please-now", "exported-secret-value"):
        assert secret not in stderr + json.dumps(report)


def test_environ_checks_what_compose_handed_over(monkeypatch, capsys):
    for name in check_env.KNOWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("GRAFANA_ADMIN_PASSWORD", PASSWORD)
    monkeypatch.setenv("COMPUTECACHE_MODE", "lru")
    assert check_env.main(["--environ"]) == 0
    monkeypatch.setenv("COMPUTECACHE_MODE", "lru\r")
    monkeypatch.setenv("VLLM_API_KEY", KEY + "\r")
    assert check_env.main(["--environ"]) == 1
    errors = capsys.readouterr().err
    assert "COMPUTECACHE_MODE='lru\\r' must be lru or active" in errors
    assert "VLLM_API_KEY holds a space or an invisible character" in errors


@pytest.mark.parametrize(
    ("text", "environ", "fault"),
    [
        (GOOD, {}, None),
        (GOOD, {"COMPUTECACHE_MODE": "lru"}, None),
        (GOOD, {"COMPUTECACHE_MODE": "turbo"}, "COMPUTECACHE_MODE='turbo' must be lru or active"),
        (GOOD + "COMPUTECACHE_SCANLIMIT=8\n", {}, "COMPUTECACHE_SCANLIMIT='8' is no setting"),
        (None, {}, ".env: No such file or directory"),
    ],
)
def test_as_a_provider_of_compose_it_ends_up_with_its_faults(tmp_path, text, environ, fault):
    """What Compose calls: `up` in the folder with what it read as the environment."""
    program = REPO / "scripts/check_env.py"
    if text is not None:
        write(tmp_path, text)
    secrets = {"VLLM_API_KEY": KEY, "GRAFANA_ADMIN_PASSWORD": PASSWORD}

    def call(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [program, "compose", "--project-name=x", *words, "guard"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]} | secrets | environ,
            capture_output=True,
            text=True,
            check=False,
        )

    done = call("up")
    if fault is None:
        assert (done.returncode, done.stdout) == (0, "")
    else:
        answer = json.loads(done.stdout)
        assert (done.returncode, answer["type"]) == (1, "error")
        assert fault in answer["message"]
        assert KEY not in done.stdout
    assert call("down").returncode == 0, "what is refused can still be taken down"


def shell_values(path: Path) -> dict[str, str]:
    listing = subprocess.run(
        ["env", "-i", "sh", "-c", 'set -a; . "$1"; exec /usr/bin/env -0', "sh", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    values = dict(item.split("=", 1) for item in listing.split("\0") if item)
    return {name: value for name, value in values.items() if name.startswith("NAME")}


@given(
    st.lists(
        st.builds(
            "{0}{1}{0}".format,
            st.sampled_from(["", "'", '"']),
            st.text(st.sampled_from(r"aZ09_./:@%+,=- #?!*()<>;&|\$`'\"~{}[]^" + "\té"), max_size=9),
        ),
        min_size=20,
        max_size=60,
    )
)
@settings(max_examples=30, deadline=None)
def test_accepted_lines_are_read_alike_by_a_shell_and_dotenv(tmp_path_factory, raws):
    lines = [f"NAME{i}={raw}" for i, raw in enumerate(raws)]
    values, _ = check_env.read_lines("\n".join(lines).encode())
    accepted = {name: value for name, value in values.items() if value is not None}
    text = "".join(f"{line}\n" for line in lines if line.partition("=")[0] in accepted)
    path = tmp_path_factory.mktemp("env") / ".env"
    path.write_text(text)
    assert dict(dotenv_values(stream=StringIO(text))) == accepted
    assert shell_values(path) == accepted


def test_accepted_lines_are_read_alike_by_compose(tmp_path):
    raws = ["plain-1.5/x:@%+,=", "'a b#c'", '"a; (b) | c*"', "", "''", "a=b", "'{\"a\": [1]}'"]
    lines = [f"NAME{i}={raw}" for i, raw in enumerate(raws)]
    values, faults = check_env.read_lines("\n".join(lines).encode())
    assert faults == []
    (tmp_path / ".env").write_text("\n".join(lines))
    environment = {name: f"<${{{name}}}>" for name in values}
    stack = {"services": {"s": {"image": "i", "environment": environment}}}
    (tmp_path / "docker-compose.yml").write_text(json.dumps(stack))
    result = subprocess.run(
        [COMPOSE, "config"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert yaml.safe_load(result.stdout)["services"]["s"]["environment"] == {
        name: f"<{value}>" for name, value in values.items()
    }
