# SPDX-License-Identifier: Apache-2.0
"""compose.yaml: valid for the published schema, closed to other hosts, complete."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from check_jsonschema.cli.main_command import main as check_jsonschema
from click.testing import CliRunner

import check_env

REPO = Path(__file__).parents[2]
COMPOSE = Path(sys.executable).with_name("docker-compose")
SERVERS = ("vllm", "prometheus", "grafana")


def schema_findings(path: Path) -> tuple[int, str]:
    """The Compose specification's own schema, as check-jsonschema ships it."""
    result = CliRunner().invoke(
        check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(path)]
    )
    return result.exit_code, result.output


def test_file_is_valid_for_the_compose_specification(tmp_path, interpolated):
    assert schema_findings(REPO / "compose.yaml")[0] == 0
    path = tmp_path / "compose.yaml"
    path.write_text(yaml.safe_dump(interpolated()))
    code, output = schema_findings(path)
    assert code == 0, output


def test_the_schema_would_find_a_misspelt_key(tmp_path, compose_text):
    path = tmp_path / "compose.yaml"
    path.write_text(compose_text.replace("healthcheck:", "health_check:", 1))
    code, output = schema_findings(path)
    assert code == 1
    assert "health_check" in output


def test_every_variable_is_required_or_has_a_default(compose_text):
    lines = [line.partition("#")[0] for line in compose_text.splitlines()]
    used = re.findall(r"\$\{?(\w+)([^}]*)\}?", "\n".join(lines))
    assert {name for name, rest in used if not re.match(r":\?|:?-", rest)} == set()
    required = {name for name, rest in used if rest.startswith(":?")}
    assert required == set(check_env.SECRETS)
    assert {name for name, _ in used} == check_env.KNOWN


@pytest.mark.parametrize("name", check_env.SECRETS)
@pytest.mark.parametrize("value", ["", None], ids=["blank", "missing"])
def test_blank_secret_stops_the_start_with_its_name(interpolated, name, value):
    with pytest.raises(KeyError, match=rf"{name} is blank or missing\. .*\.env"):
        interpolated(**{name: value})


def test_placeholder_stops_the_start(interpolated, tmp_path):
    """preflight sees what Compose read, and nothing starts before it has succeeded."""
    services = interpolated()["services"]
    preflight = services["preflight"]
    mounted = {mount["target"]: mount["source"] for mount in preflight["volumes"]}
    assert mounted == {"/check_env.py": "./scripts/check_env.py", "/.env": "./.env"}
    assert preflight["command"] == []
    python, *command = preflight["entrypoint"]
    assert python == "python3"
    env_file = tmp_path / ".env"
    here = {"/check_env.py": REPO / "scripts/check_env.py", "/.env": env_file}
    command = [sys.executable, "-S", *(here.get(word, word) for word in command)]

    def start(text: str = "", **changed: str) -> subprocess.CompletedProcess:
        good = {name: preflight["environment"][name] for name in check_env.SECRETS}
        env_file.write_text("".join(f"{k}={v}\n" for k, v in good.items()) + text)
        environment = interpolated(**changed)["services"]["preflight"]["environment"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert start().returncode == 0
    assert start("COMPUTECACHE_SCANLIMIT=8\n").returncode == 1, "only the file shows this one"
    refused = start(VLLM_API_KEY="replace-me-with-a-random-key")
    assert (refused.returncode, "VLLM_API_KEY is still a placeholder" in refused.stderr) == (
        1,
        True,
    )
    assert start(COMPUTECACHE_SCAN_LIMIT="0").returncode == 1
    not_needed = {"MODEL", "HF_TOKEN", "SOURCE_REVISION"}  # whatever they are is accepted
    assert set(preflight["environment"]) == check_env.KNOWN - not_needed

    condition = {service: services[service].get("depends_on") for service in SERVERS}
    assert condition == {
        "vllm": {"preflight": {"condition": "service_completed_successfully"}},
        "prometheus": {"vllm": {"condition": "service_started"}},
        "grafana": {"prometheus": {"condition": "service_healthy"}},
    }


def test_ports_are_published_on_loopback_only(interpolated):
    published = [
        port for service in interpolated()["services"].values() for port in service.get("ports", [])
    ]
    assert sorted(published) == [
        "127.0.0.1:3000:3000",
        "127.0.0.1:8000:8000",
        "127.0.0.1:9090:9090",
    ]


def test_policy_metrics_stay_on_the_private_network(interpolated):
    vllm = interpolated()["services"]["vllm"]
    assert vllm["environment"]["COMPUTECACHE_METRICS_HOST"] == "0.0.0.0"
    assert not any("8001" in port for port in vllm["ports"])
    assert vllm["expose"] == [vllm["environment"]["COMPUTECACHE_METRICS_PORT"]]
    networks = {name: service.get("network_mode") for name, service in services_of(interpolated)}
    assert networks == dict.fromkeys(SERVERS) | {"preflight": "none"}


def services_of(interpolated):
    return interpolated()["services"].items()


def test_servers_restart_have_health_checks_and_gain_no_privileges(interpolated):
    for name, service in services_of(interpolated):
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        if name in SERVERS:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] == "CMD", name


def test_images_are_pinned_as_documented(interpolated):
    images = {name: service["image"] for name, service in services_of(interpolated)}
    assert images == {
        "preflight": "computecache-vllm:0.32.0",
        "vllm": "computecache-vllm:0.32.0",
        "prometheus": "prom/prometheus:v3.15.0",
        "grafana": "grafana/grafana:13.2.4",
    }


def test_configuration_is_mounted_read_only_and_must_exist(interpolated):
    sources = []
    for name, service in services_of(interpolated):
        for volume in service.get("volumes", []):
            if isinstance(volume, dict):
                assert volume["type"] == "bind"
                assert volume["read_only"] is True, name
                assert volume["bind"] == {"create_host_path": False}, name
                sources.append(volume["source"])
            else:
                assert re.match(r"[a-z-]+:/", volume), "a path in short form would be created"
    assert sources.pop(sources.index("./.env"))
    assert [source for source in sources if not (REPO / source).exists()] == []
    assert {source.removeprefix("./") for source in sources} == set(check_env.MOUNTED)


def test_named_volumes_are_declared_and_used(interpolated):
    stack = interpolated()
    used = {
        volume.split(":")[0]
        for service in stack["services"].values()
        for volume in service.get("volumes", [])
        if isinstance(volume, str)
    }
    assert used == set(stack["volumes"])
    assert used == {"hf-cache", "vllm-cache", "prometheus-data", "grafana-data"}


def test_one_nvidia_device_is_reserved(interpolated):
    vllm = interpolated()["services"]["vllm"]
    assert vllm["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert vllm["ipc"] == "host"


def test_no_secret_is_on_a_command_line(interpolated):
    for name, service in services_of(interpolated):
        line = json.dumps([service.get("command"), service.get("entrypoint"), service.get("build")])
        for secret in ("8c5f6a1e0b7d4c39", "1f2e3d4c5b6a7988"):
            assert secret not in line, name


def test_defaults_of_the_policy_are_those_of_env_example_and_of_the_policy(interpolated):
    example = {
        name: value
        for name, _, value in (
            line.partition("=") for line in (REPO / ".env.example").read_text().splitlines()
        )
        if name.startswith("COMPUTECACHE_")
    }
    served = interpolated()["services"]["vllm"]["environment"]
    assert {name: str(served[name]) for name in example} == example
    assert len(example) == 7


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for line in json.load(sys.stdin):
    args = parser.parse_args(line)
    validate_parsed_serve_args(args)
    print(json.dumps({k: v for k, v in vars(args).items() if isinstance(v, (int, str, float))}))
"""


@pytest.mark.server
def test_the_real_parser_takes_the_command(interpolated, tmp_path):
    """Each option exists in vLLM 0.32.0; a blank NUM_GPU_BLOCKS means the whole GPU."""
    lines = [
        interpolated(**changed)["services"]["vllm"]["command"]
        for changed in (
            {},
            {"NUM_GPU_BLOCKS": ""},
            {"MODEL": "Qwen/Qwen3-8B", "NUM_GPU_BLOCKS": "4096", "MAX_MODEL_LEN": "32768"},
        )
    ]
    result = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    default, whole, large = map(json.loads, result.stdout.splitlines()[-3:])
    assert default["model_tag"] == "Qwen/Qwen3-0.6B"
    assert (default["host"], default["port"]) == ("0.0.0.0", 8000)
    assert (default["max_model_len"], default["num_gpu_blocks_override"]) == (1024, 128)
    assert default["block_size"] == 16
    for switch in ("enable_prefix_caching", "enable_prompt_tokens_details", "kv_cache_metrics"):
        assert default[switch] is True
    assert "num_gpu_blocks_override" not in whole
    assert (large["model_tag"], large["num_gpu_blocks_override"]) == ("Qwen/Qwen3-8B", 4096)
    assert large["max_model_len"] == 32768


class TestWithCompose:
    """The test group's own Compose, by its path: no plugin of a user's HOME. `config` needs no
    engine."""

    def config(self, folder: Path, env: str, *names: str) -> subprocess.CompletedProcess:
        for name in (names := names or ("compose.yaml",)):
            (folder / name).write_text((REPO / name).read_text())
        (folder / ".env").write_text(env)
        return subprocess.run(
            [COMPOSE, *(word for name in names for word in ("-f", name)), "config"],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    def good_env(self, *lines: str) -> str:
        example = (REPO / ".env.example").read_text()
        for placeholder in re.findall("replace-me.*", example):
            example = example.replace(placeholder, f"k{abs(hash(placeholder))}")
        return "\n".join([example, *lines])

    def test_example_with_secrets_is_accepted_and_read_as_here(self, tmp_path, interpolated):
        changed = {"COMPUTECACHE_MODE": "active", "NUM_GPU_BLOCKS": "", "API_PORT": "8155"}
        env = self.good_env(*(f"{name}={value}" for name, value in changed.items()))
        result = self.config(tmp_path, env)
        assert result.returncode == 0, result.stderr
        mine = interpolated(**changed)["services"]["vllm"]
        theirs = yaml.safe_load(result.stdout)["services"]["vllm"]
        assert theirs["command"] == mine["command"]
        environment = {
            name: str(value) for name, value in theirs["environment"].items() if "KEY" not in name
        }
        assert environment == {
            name: str(value) for name, value in mine["environment"].items() if "KEY" not in name
        }
        assert "8155" in json.dumps(theirs["ports"])

    @pytest.mark.parametrize("name", check_env.SECRETS)
    def test_blank_secret_is_refused_by_name(self, tmp_path, name):
        result = self.config(tmp_path, re.sub(rf"(?m)^{name}=.*", f"{name}=", self.good_env()))
        assert result.returncode != 0
        assert f"{name}" in result.stderr
        assert "is blank or missing" in result.stderr

    def test_without_a_gpu_only_what_needs_one_is_replaced(self, tmp_path):
        """compose.cpu.yaml over compose.yaml; tests/stack starts it."""
        gpu = yaml.safe_load(self.config(tmp_path, self.good_env()).stdout)["services"]
        result = self.config(tmp_path, self.good_env(), "compose.yaml", "compose.cpu.yaml")
        assert result.returncode == 0, result.stderr
        (tmp_path / "merged.yaml").write_text(result.stdout)
        code, output = schema_findings(tmp_path / "merged.yaml")
        assert code == 0, output
        cpu = yaml.safe_load(result.stdout)["services"]
        assert {name: service for name, service in cpu.items() if service != gpu[name]}.keys() == {
            "preflight",
            "vllm",
        }
        vllm, was = cpu["vllm"], gpu["vllm"]
        assert {key for key in was.keys() | vllm.keys() if was.get(key) != vllm.get(key)} == {
            *("build", "command", "deploy", "entrypoint", "environment", "healthcheck", "image")
        }
        assert "deploy" not in vllm
        assert was["environment"].items() <= vllm["environment"].items()
        assert vllm["healthcheck"]["test"] == was["healthcheck"]["test"]
        lost = {word.partition("=")[0] for word in set(was["command"]) - set(vllm["command"])}
        sizes = {"--block-size", "--num-gpu-blocks-override", "--gpu-memory-utilization"}
        assert lost == {"Qwen/Qwen3-0.6B", *sizes}
