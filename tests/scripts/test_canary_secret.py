# SPDX-License-Identifier: Apache-2.0
"""The secrets of .env are in nothing that a canary prints or leaves, whatever repeats them."""

import json

import pytest

GRAFANA = "grafana-word-of-this-test"
FORBIDDEN = ("key-of-this-test", GRAFANA)


def everything(stack):
    files = [path for path in stack.out.rglob("*") if path.is_file()]
    assert files
    return stack.output + "".join(path.read_text() for path in files)


@pytest.fixture
def secrets(stack):
    """A stack with secrets in .env, whose `docker` fails and repeats .env, as Compose may."""
    stack.env_file.write_text(
        stack.env_file.read_text().replace("secret-of-this-test", "key-of-this-test")
        + f"GRAFANA_ADMIN_PASSWORD={GRAFANA}\n"
    )
    docker = stack.folder / "bin" / "docker"
    program = docker.read_text().splitlines()[-1].removeprefix("exec ")
    docker.write_text(
        f"#!/bin/sh\nexport FAKE_DOCKER={stack.folder}\n"
        f"cat {stack.env_file} >&2\n{program} || {{ cat {stack.env_file} >&2; exit 1; }}\n"
    )
    return stack


def test_what_docker_repeats_of_env_is_taken_out(secrets):
    (secrets.folder / "broken").touch()
    assert secrets.run() in (1, 2), secrets.output
    assert secrets.record()["final_mode"] == "unknown"
    said = everything(secrets)
    assert "[secret]" in said
    assert not [word for word in FORBIDDEN if word in said]


@pytest.mark.parametrize("end", ["\n", "\n\n", "\r", "\u00e9"])
def test_a_key_with_an_end_that_no_header_holds_is_not_shown(secrets, end):
    secrets.fake_options("--api-key key-of-this-test --blocks 4096")
    assert secrets.run(VLLM_API_KEY=f"key-of-this-test{end}") == 2, secrets.output
    assert "Traceback" not in secrets.output
    said = everything(secrets)
    assert not [word for word in FORBIDDEN if word in said]
    if end == "\n":
        assert json.loads(secrets.output.splitlines()[0])["outcome"] == "INCONCLUSIVE"
    else:
        assert "VLLM_API_KEY in the environment has a c" in secrets.output
        assert not (secrets.folder / "docker.log").exists(), "found before any server was started"
