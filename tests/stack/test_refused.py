# SPDX-License-Identifier: Apache-2.0
"""A .env or a shell that is refused, with the stack up: what stops it, and what goes on serving."""

import importlib.util
from pathlib import Path

import pytest
import stack_images
import yaml
from stack_project import CPU

TESTS = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("cases", TESTS / "scripts/test_check_env.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

CHECK = ("run", "--rm", "-T", "preflight")


@pytest.fixture
def serving(stack):
    """The stack, whose vllm container must be the same and serve at the end of the test."""
    before = stack.container("vllm")
    yield stack
    stack.write_env()
    assert stack.container("vllm") == before
    assert stack.serves()


def start(project, *files: str, **shell: str):
    """What preflight, as Compose starts it, says of the .env as it is."""
    shell |= {"COMPOSE_PROJECT_NAME": project.name}  # most of these files do not say it
    return project.run("docker", "compose", *files, *CHECK, check=False, **shell)


def test_each_env_that_check_env_refuses_is_stopped_before_vllm_is_touched(serving):
    """By preflight, which reads the file and what Compose made of it, or by Compose itself."""
    went_on = []
    for name, (text, _) in cases.BAD.items():
        serving.write_env(text)
        # COMPOSE_FILE is obeyed where no -f is given.
        done = start(serving, *(() if "COMPOSE_FILE" in text else CPU))
        if done.returncode == 0:
            went_on.append(name)
        assert done.returncode != 125, (name, done.stderr)
    assert went_on == []
    serving.write_env(cases.GOOD)
    assert start(serving, *CPU).returncode == 0, "the good file is stopped as well"


def test_with_the_guard_up_itself_leaves_the_old_server_when_env_is_refused(serving):
    """compose.guard.yaml; COMPOSE_FILE has no effect beside -f, which is what Compose is given."""
    guarded = ("docker", "compose", *CPU, "-f", "compose.guard.yaml", "up", "-d", "vllm")
    before = serving.container("vllm")
    texts = {name: text for name, (text, _) in cases.BAD.items() if "COMPOSE_FILE" not in text}
    texts["another mode than the file's"] = cases.GOOD
    for name, text in texts.items():
        serving.write_env(text)
        shell = {"COMPOSE_PROJECT_NAME": serving.name}
        if text == cases.GOOD:
            shell["COMPUTECACHE_MODE"] = "turbo"
        done = serving.run(*guarded, check=False, **shell)
        assert done.returncode != 0, name
        assert serving.container("vllm") == before, name
    assert "COMPUTECACHE_MODE='turbo' must be lru or active" in done.stderr
    serving.write_env()
    serving.run(*guarded)  # accepted, and nothing has changed


def test_compose_obeys_what_check_env_refuses_of_a_shell(serving):
    """Each variable does something to what would be started, and check_env names it."""
    serving.write_env(COMPUTECACHE_MODE="lru")
    other = serving.folder / "other.env"
    other.write_text(serving.env_file.read_text().replace("NUM_GPU_BLOCKS=64", "NUM_GPU_BLOCKS=65"))
    (serving.folder / "other.yaml").write_text("services: {other: {image: other}}\n")
    shell = {
        "COMPUTECACHE_MODE": "active",
        "API_PORT": "8123",
        "COMPOSE_FILE": "other.yaml",
        "COMPOSE_ENV_FILES": "other.env",
        "COMPOSE_PROJECT_NAME": "other",
    }
    plain = serving.run("docker", "compose", "config").stdout
    for name, value in shell.items():
        assert serving.run("docker", "compose", "config", **{name: value}).stdout != plain, name
        code, (fault,) = serving.check_env(**{name: value})
        assert code == 1
        assert fault.startswith(f"{name} is exported in this shell")
        assert fault.endswith(f"`unset {name}`")


def test_a_refused_shell_stops_the_documented_command(serving):
    """`check_env && up -d` does not go on in active because the shell says so."""
    serving.write_env(COMPUTECACHE_MODE="lru")
    done = serving.run(
        *("sh", "-c", f"python3 scripts/check_env.py && docker compose {' '.join(CPU)} up -d vllm"),
        check=False,
        COMPUTECACHE_MODE="active",
    )
    assert done.returncode == 1
    assert "`unset COMPUTECACHE_MODE`" in done.stderr


def test_prometheus_refuses_the_retentions_that_check_env_refuses(stack):
    image = yaml.safe_load((stack.folder / "compose.yaml").read_text())
    image = image["services"]["prometheus"]["image"]
    assert image == stack_images.published("prometheus")
    given = {"15d": True, "1w2d": True, "90m": True, "15": False, "2d1w": False, "1.5d": False}
    program = (
        "for given in $0 $@; do echo $given $(prometheus --config.file=/none"
        " --storage.tsdb.retention.time=$given 2>&1 | grep -c 'not a valid duration'); done"
    )
    shown = stack.run("docker", "run", "--rm", "--entrypoint", "sh", image, "-c", program, *given)
    refused = dict(line.split() for line in shown.stdout.splitlines())
    assert refused == {value: "0" if good else "1" for value, good in given.items()}
    for value, good in given.items():
        fault = cases.check_env.check_setting("PROMETHEUS_RETENTION", value)
        assert (fault is None) == good, value


def test_vllm_refuses_the_length_that_check_env_refuses(serving):
    """The stack itself serves with the longest one that is accepted."""
    longest = int(serving.settings["MAX_MODEL_LEN"])
    command = serving.inspect("vllm")["Args"]
    assert f"--max-model-len={longest}" in command
    serving.write_env(MAX_MODEL_LEN=str(longest + 1))
    code, (fault,) = serving.check_env()
    assert code == 1
    assert fault.startswith(f"MAX_MODEL_LEN={longest + 1} is more than the {longest} tokens")
    done = serving.compose("run", "--rm", "--no-deps", "-T", "vllm", check=False)
    assert done.returncode != 0
    assert "max seq len" in (done.stdout + done.stderr)


def test_two_equal_ports_cannot_be_published(serving):
    serving.write_env(PROMETHEUS_PORT=serving.settings["API_PORT"])
    code, (fault,) = serving.check_env()
    assert code == 1
    assert fault.startswith("API_PORT and PROMETHEUS_PORT are both")
    done = serving.compose("up", "-d", "--no-deps", "prometheus", check=False)
    assert done.returncode != 0
    assert "port is already allocated" in done.stderr
    serving.write_env()
    serving.up()
