# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md, block by block on the engine, and what it says beside each of them.

The stack without a GPU stands in for the one with: what is changed for that is below. The blocks
go on from each other, on one project. Other tests' containers of the same image would keep it
from being removed, so this runs before those that share a stack.
"""

import json
import socket
import time

import httpx
import pytest
import stack_guide
import stack_images
import yaml
from dotenv import dotenv_values
from stack_canary import DRILL, MODE, QUICK, engine_mode
from stack_project import READY_S, REPO, Project, wait_for

BLOCK_S = 1000  # a canary starts vLLM four times
SERVICES = ("vllm", "prometheus", "grafana")
IMAGE = "computecache-vllm-cpu:0.32.0"
COMMANDS = {
    "computecache-vllm:": "computecache-vllm-cpu:",
    "--target compose": f"--target compose {' '.join(word or chr(39) * 2 for word in DRILL)}",
}
FILES = "COMPOSE_FILE=compose.yaml:compose.cpu.yaml:compose.quick.yaml\n"
# Answers Grafana's health check and keeps one file in its volume; its image cannot be had.
GRAFANA = f"""FROM {stack_images.published("prometheus")}
USER root
RUN mkdir -p /srv/api /var/lib/grafana && echo ok > /srv/api/health && chown 472 /var/lib/grafana
USER 472
WORKDIR /srv
STOPSIGNAL SIGKILL
ENTRYPOINT ["sh", "-c", "state=/var/lib/grafana/state; [ -e $state ] || \\
  cat /proc/sys/kernel/random/uuid > $state; exec busybox httpd -f -p 3000 -h /srv"]
"""
PAGE = stack_guide.blocks(stack_guide.PAGE.read_text())


class Guide:
    """The project that the guide's commands are run on, and what was seen of it earlier."""

    def __init__(self, project: Project) -> None:
        self.project, self.output = project, ""
        self.failed: str | None = None
        self.containers: dict[str, str] = {}
        self.grafana_state, self.stopped_at, self.env = "", 0.0, b""
        # A checkout as a user has it: no .env yet, but a commit and a .venv.
        project.env_file.unlink()
        (project.folder / ".venv").symlink_to(REPO / ".venv")
        (project.folder / "compose.quick.yaml").write_text(QUICK)
        ports = {name: value for name, value in project.settings.items() if "PORT" in name}
        self.example(COMPOSE_PROJECT_NAME=project.name, **ports)
        author = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        for command in (("init", "-q"), ("add", "compose.yaml"), (*author, "commit", "-qm", "a")):
            project.run("git", *command)

    def example(self, **settings: str) -> None:
        """Add settings to .env.example, where the guide's own commands take them from."""
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        with (self.project.folder / ".env.example").open("a") as file:
            file.write(lines)

    def setting(self, name: str) -> str | None:
        return dotenv_values(self.project.env_file).get(name)

    def docker(self, *arguments: str, check: bool = True):
        return self.project.run("docker", *arguments, check=check)

    def serves(self) -> bool:
        key = {"Authorization": f"Bearer {self.setting('VLLM_API_KEY')}"}
        body = {"prompt": [10, 11, 12], "max_tokens": 1}
        url = f"{self.project.url('API_PORT')}/v1/completions"
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.post(url, json=body, headers=key).is_success

    def ids(self) -> dict[str, str]:
        return {service: self.project.container(service) for service in SERVICES}

    def of_project(self, kind: str) -> set[str]:
        label = f"label=com.docker.compose.project={self.project.name}"
        everything = ("-a",) if kind == "container" else ()
        return set(self.docker(kind, "ls", "-q", *everything, "--filter", label).stdout.split())

    def volumes(self) -> set[str]:
        names = yaml.safe_load((self.project.folder / "compose.yaml").read_text())["volumes"]
        return {f"{self.project.name}_{name}" for name in names}

    def closed_ports(self) -> set[str]:
        names = {"API_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"}
        return {name for name in names if not listens(int(self.project.settings[name]))}

    def is_scraped_now(self) -> bool:
        """As scraped_before_the_stop, of now: vLLM was made anew and may not be scraped yet."""
        self.stopped_at = time.time()
        return self.scraped_before_the_stop()

    def scraped_before_the_stop(self) -> bool:
        """Return whether Prometheus has what it scraped before the stack was stopped."""
        url = f"{self.project.url('PROMETHEUS_PORT')}/api/v1/query"
        ask = {"query": "vllm:computecache_info", "time": self.stopped_at}
        with httpx.Client(trust_env=False, timeout=10) as client:
            answer = client.get(url, params=ask)
        return answer.is_success and answer.json()["data"]["result"] != []


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def guide(new_project, give_up, tmp_path_factory, images, engine):
    name = stack_images.published("grafana")
    if stack_images.exists(name, engine) and not stack_images.label_of(name, engine):
        give_up(f"the engine has an image {name} of its own: let the tests use another engine")
    project = new_project(tmp_path_factory.mktemp("guide") / "checkout")
    try:
        project.run("docker", "build", "-q", "-t", name, "-", stdin=GRAFANA)
        yield Guide(project)
    finally:
        project.remove()
        project.run("docker", "image", "rm", "--force", name, check=False)


def are_healthy(guide) -> bool:
    health = [guide.project.inspect(service)["State"]["Health"] for service in SERVICES]
    return {state["Status"] for state in health} == {"healthy"}


def is_up(guide, mode="lru"):
    assert are_healthy(guide)
    assert guide.project.inspect("preflight")["State"]["ExitCode"] == 0
    assert guide.serves()
    assert engine_mode(guide.project) == mode
    assert guide.closed_ports() == set()


def first_start(guide):
    is_up(guide)
    head = guide.project.run("git", "rev-parse", "HEAD").stdout.strip()
    form = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    running = guide.project.inspect("vllm")["Image"]
    assert guide.docker("image", "inspect", "-f", form, running).stdout.strip() == head
    for service in SERVICES:
        assert service in guide.output, "docker compose ps shows it"


def answers(guide):
    assert '"choices"' in guide.output
    assert 'mode="lru"' in guide.output


def guarded(guide):
    """A refused .env leaves the old server, which goes on serving."""
    assert guide.setting("COMPOSE_FILE").endswith(":compose.guard.yaml")
    before, good = guide.ids(), guide.project.env_file.read_bytes()
    guide.project.env_file.write_bytes(good.replace(b"_MODE=lru", b"_MODE=turbo"))
    try:
        done = guide.project.run("docker", "compose", "up", "-d", "--wait", check=False)
        assert done.returncode != 0
        assert "COMPUTECACHE_MODE='turbo' must be lru or active" in done.stdout + done.stderr
        assert guide.ids() == before
        assert guide.serves()
    finally:
        guide.project.env_file.write_bytes(good)
    is_up(guide)


def ends_in_lru(guide):
    """And what its record says of a canary that was accepted."""
    assert "ACCEPT" in guide.output
    assert guide.project.env_file.read_bytes() == guide.env
    assert guide.setting(MODE) == "lru"
    is_up(guide)
    record = json.loads((guide.project.folder / "out" / "canary.json").read_text())
    assert record["outcome"] == "ACCEPT"
    assert [(p["phase"], p["mode"], p["hot_prefix"]) for p in record["phases"]] == [
        ("baseline", "lru", "lost"),
        ("candidate", "active", "kept"),
        ("rollback", "lru", "lost"),
    ]
    published = guide.project.url("API_PORT")
    assert {visit["report"]["base_url"] for visit in record["visits"]} == {published}


def promoted(guide):
    assert "ACCEPT" in guide.output
    assert guide.setting(MODE) == "active"
    is_up(guide, "active")


def rolled_back(guide):
    """And what the blocks after this one must keep."""
    assert guide.setting(MODE) == "lru"
    is_up(guide)
    guide.containers = guide.ids()
    state = ("exec", guide.containers["grafana"], "cat", "/var/lib/grafana/state")
    guide.grafana_state = guide.docker(*state).stdout
    wait_for("a scrape that can be found again", guide.is_scraped_now, 60)


def stopped(guide):
    assert guide.ids() == guide.containers
    for service in SERVICES:
        assert guide.project.inspect(service)["State"]["Status"] == "exited", service
    assert len(guide.closed_ports()) == 3
    assert guide.of_project("volume") == guide.volumes()


def goes_on(guide):
    """`start` does not wait, so this does."""
    assert guide.ids() == guide.containers
    wait_for("every service is healthy again", lambda: are_healthy(guide), READY_S)
    is_up(guide)
    state = ("exec", guide.containers["grafana"], "cat", "/var/lib/grafana/state")
    assert guide.docker(*state).stdout == guide.grafana_state != ""
    assert guide.scraped_before_the_stop()


def is_down(guide):
    """Containers and network are gone; new containers find what the volumes hold."""
    assert guide.of_project("container") == set()
    assert guide.of_project("network") == set()
    assert len(guide.closed_ports()) == 3
    assert guide.of_project("volume") == guide.volumes()
    assert stack_images.exists(IMAGE, guide.project.environ)
    guide.project.run("docker", "compose", "up", "-d", "--no-deps", "prometheus", "grafana")
    wait_for("Prometheus is ready", lambda: prometheus_is_ready(guide), 60)
    assert guide.scraped_before_the_stop()
    state = ("exec", guide.project.container("grafana"), "cat", "/var/lib/grafana/state")
    assert guide.docker(*state).stdout == guide.grafana_state


def prometheus_is_ready(guide) -> bool:
    try:
        with httpx.Client(trust_env=False, timeout=10) as client:
            return client.get(f"{guide.project.url('PROMETHEUS_PORT')}/-/ready").is_success
    except httpx.TransportError:
        return False


def nothing_is_kept(guide):
    for kind in ("container", "network", "volume"):
        assert guide.of_project(kind) == set(), kind
    assert len(guide.closed_ports()) == 3
    assert stack_images.exists(IMAGE, guide.project.environ)


def image_is_gone(guide):
    """And can be built again with the command that the guide names."""
    assert not stack_images.exists(IMAGE, guide.project.environ)
    guide.project.run("docker", "compose", "build", "vllm")
    assert stack_images.exists(IMAGE, guide.project.environ)


CHECKS = {
    "Without a GPU 1": is_up,
    "First start 1": first_start,
    "First start 2": answers,
    "Let `up` check first 1": guarded,
    "Canary, promote, roll back 1": ends_in_lru,
    "Canary, promote, roll back 2": promoted,
    "Canary, promote, roll back 3": rolled_back,
    "Pause and delete 1": stopped,
    "Pause and delete 2": goes_on,
    "Pause and delete 3": is_down,
    "Pause and delete 4": nothing_is_kept,
    "Pause and delete 5": image_is_gone,
}


@pytest.mark.parametrize("name", [name for name in PAGE if name not in stack_guide.APART])
def test_block(guide, name):
    """It is run as it is written, but for COMMANDS, and what the page says of it holds."""
    if guide.failed:
        pytest.fail(f"the guide stopped working at block {guide.failed!r}", pytrace=False)
    guide.failed = name
    if name == "First start 1":
        path = guide.project.folder / ".env.example"
        path.write_text(path.read_text() + FILES)
    if name == "Canary, promote, roll back 1":
        guide.env = guide.project.env_file.read_bytes()
    text = PAGE[name]
    for words, instead in COMMANDS.items():
        text = text.replace(words, instead)
    shell = ("bash", "-euo", "pipefail", "-c")
    done = guide.project.run(*shell, text, check=False, timeout_s=BLOCK_S)
    guide.output = done.stdout + done.stderr
    assert done.returncode == 0, guide.output[-4000:]
    CHECKS.get(name, lambda guide: None)(guide)
    guide.failed = None
