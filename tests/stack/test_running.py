# SPDX-License-Identifier: Apache-2.0
"""The stack without a GPU, up: whom it serves, what it shows of itself, and through which proxies.

It runs from a checkout made with umask 077, opened as check_env says, in a path with spaces and
umlauts, under proxy settings that lead nowhere, on the host and in every container.
"""

import json
import socket
from pathlib import Path

import pytest
from stack_project import SECRETS, SERVED, make_closed

PUBLISHED = {"vllm": ("8000/tcp", "API_PORT"), "prometheus": ("9090/tcp", "PROMETHEUS_PORT")}
KEY, PASSWORD = SECRETS["VLLM_API_KEY"], SECRETS["GRAFANA_ADMIN_PASSWORD"]
AS_THE_ENVIRONMENT_SAYS = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"


def test_every_service_gets_healthy_and_the_model_answers(stack):
    for service in SERVED:
        assert stack.inspect(service)["State"]["Health"]["Status"] == "healthy", service
    assert stack.inspect("preflight")["State"]["ExitCode"] == 0
    assert stack.serves()


def test_check_env_named_what_umask_077_had_closed_and_its_command_opened_it(stack):
    assert " " in str(stack.folder)
    assert not str(stack.folder).isascii()
    (fault,) = stack.closed_faults
    assert fault.startswith("the containers' users cannot read scripts/check_env.py monitoring/")
    assert stack.check_env() == (0, [])
    untouched = {path.stat().st_mode & 0o777 for path in (stack.folder / "docker").iterdir()}
    assert untouched == {0o600}, "the other files are as closed as they were"


def test_without_that_command_prometheus_cannot_read_its_files(new_project, tmp_path):
    project = new_project(tmp_path / "checkout")
    make_closed(project.folder)
    project.compose("up", "-d", "--no-deps", "prometheus")
    assert "/etc/prometheus/prometheus.yml" in project.wait_for_log(
        "prometheus", "permission denied"
    )


def test_under_proxies_that_lead_nowhere_only_what_asks_them_fails(stack):
    """The health checks ask no proxy; the same question by way of the environment fails."""
    environment = stack.inspect("vllm")["Config"]["Env"]
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        assert f"{name}={stack.environ[name]}" in environment
    asked = stack.compose(
        *("exec", "-T", "vllm", "python3", "-c", AS_THE_ENVIRONMENT_SAYS), check=False
    )
    assert "Connection refused" in asked.stderr
    for service in SERVED:
        checks = stack.inspect(service)["State"]["Health"]["Log"]
        assert [check["ExitCode"] for check in checks][-1:] == [0], (service, checks)


def test_the_engine_publishes_on_loopback_only(stack):
    for service, (inside, port) in PUBLISHED.items():
        published = {
            name: bindings
            for name, bindings in stack.inspect(service)["NetworkSettings"]["Ports"].items()
            if bindings
        }
        assert published == {inside: [{"HostIp": "127.0.0.1", "HostPort": stack.settings[port]}]}
    assert not stack.inspect("preflight")["NetworkSettings"]["Ports"]


def test_no_port_of_the_host_answers_on_the_networks_gateway(stack):
    """From the host and from a container, whose way to the host it is."""
    network = f"{stack.name}_default"
    shown = stack.run("docker", "network", "inspect", network).stdout
    gateway = json.loads(shown)[0]["IPAM"]["Config"][0]["Gateway"]
    program = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    inside = ("exec", "-T", "vllm", "python3", "-c", program)
    for _, name in PUBLISHED.values():
        port = stack.settings[name]
        socket.create_connection(("127.0.0.1", int(port)), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((gateway, int(port)), 5)
        asked = stack.compose(*inside, gateway, port, check=False)
        assert "ConnectionRefusedError" in asked.stderr
    assert stack.compose(*inside, "prometheus", "9090").returncode == 0


def test_a_secret_is_where_its_service_needs_it_and_nowhere_else(stack):
    """Not in other services, labels, command lines, logs or images."""
    has = {KEY: {"preflight", "vllm"}, PASSWORD: {"preflight"}}  # and Grafana, not started here
    for service in ("preflight", *SERVED):
        shown = stack.inspect(service)
        environment, rest = json.dumps(shown["Config"].pop("Env")), json.dumps(shown)
        for secret, services in has.items():
            assert (secret in environment) == (service in services), service
            assert secret not in rest, service
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    assert any(b"vllm.entrypoints" in line for line in lines), "the server's own line is among them"
    logs = stack.compose("logs", "--no-color").stdout
    assert "preflight" in logs
    images = [stack.inspect(service)["Image"] for service in SERVED]
    history = stack.run("docker", "history", "--no-trunc", images[0]).stdout
    shown = stack.run("docker", "image", "inspect", *images).stdout
    for secret in (KEY, PASSWORD):
        assert [line for line in lines if secret.encode() in line] == []
        assert secret not in logs + history + shown


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False
