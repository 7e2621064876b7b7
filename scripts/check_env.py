#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check `.env` before `docker compose up`.

    python3 scripts/check_env.py [--env-file .env]
    python3 scripts/check_env.py --environ [--env-file /.env]    # in a container: what Compose
                                                                 # handed over, and the file
    scripts/check_env.py compose ...                             # as Compose calls the provider
                                                                 # of compose.guard.yaml

Compose, a shell and python-dotenv read the same `.env` differently once it holds
escapes, `$`, unbalanced quotes, trailing comments or CRLF. Rather than imitate
one of them, this accepts only lines that all of them read alike, and says how to
rewrite the others. Outside a container it also refuses what Compose takes from
the shell instead of the file, and files that the containers could not read.
Needs the standard library only. Values of secrets are never printed.

One JSON object on stdout; exit 0 accepted (warnings allowed), 1 refused, 2 the
file could not be read.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

SECRETS = {"VLLM_API_KEY": 16, "GRAFANA_ADMIN_PASSWORD": 12}  # fewest characters
OPTIONAL_SECRETS = {"HF_TOKEN"}
WHOLE_NUMBERS = {  # lowest, highest
    "COMPUTECACHE_SCAN_LIMIT": (1, 4096),
    "COMPUTECACHE_REUSE_WEIGHT": (0, 1_000_000_000),
    "COMPUTECACHE_DEPTH_WEIGHT": (0, 1_000_000_000),
    "COMPUTECACHE_AGE_WEIGHT": (0, 1_000_000_000),
    "COMPUTECACHE_QUICK_DEMOTE_PENALTY": (0, 1_000_000_000),
    "COMPUTECACHE_LOG_EVERY": (0, 1_000_000_000),
    "MAX_MODEL_LEN": (1, 100_000_000),
    "NUM_GPU_BLOCKS": (2, 100_000_000),
    "BLOCK_SIZE": (1, 1024),
    "API_PORT": (1, 65535),
    "PROMETHEUS_PORT": (1, 65535),
    "GRAFANA_PORT": (1, 65535),
}
FRACTIONS = {"GPU_MEMORY_UTILIZATION", "KV_CACHE_METRICS_SAMPLE"}  # above 0, at most 1
TEXTS = {"MODEL", "PROMETHEUS_RETENTION", "SOURCE_REVISION", "KV_TRANSFER_CONFIG", "VLLM_VERSION"}
VLLM_VERSIONS = ("0.32.0", "0.33.0")  # as in tools/install_computecache.py
BLANK_MEANS_SOMETHING = {"NUM_GPU_BLOCKS", "KV_TRANSFER_CONFIG"}
LAZY_SETTINGS = ("lazy_offload", "lmcache.mp.lazy_offload")  # as in computecache_policy.py
PORTS = {"API_PORT": "8000", "PROMETHEUS_PORT": "9090", "GRAFANA_PORT": "3000"}  # defaults
POOL = {"MAX_MODEL_LEN": "1024", "NUM_GPU_BLOCKS": "128", "BLOCK_SIZE": "16"}
CPU_POOL = {"NUM_GPU_BLOCKS": "64", "BLOCK_SIZE": "32"}  # of compose.cpu.yaml; the second is fixed
RETENTION = re.compile(
    r"(?=\d)(?:(\d+)y)?(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?"
)
RETENTION_UNITS_S = (365 * 86400, 7 * 86400, 86400, 3600, 60, 1, 0.001)
# What Compose itself reads, from the shell or from .env; COMPOSE_ENV_FILES from the shell only.
COMPOSE = {
    "COMPOSE_FILE": "starts other files than compose.yaml",
    "COMPOSE_PROJECT_NAME": "works on another stack, with other containers and volumes",
    "COMPOSE_ENV_FILES": "reads other settings than those of .env",
    "COMPOSE_DISABLE_ENV_FILE": "does not read .env",
    "COMPOSE_PATH_SEPARATOR": "reads COMPOSE_FILE differently",
}
# Mounted from the checkout and read by other users than its owner.
MOUNTED = (
    "scripts/check_env.py",
    "monitoring/prometheus.yml",
    "monitoring/recording_rules.yml",
    "monitoring/alerts.yml",
    "monitoring/grafana/provisioning",
)
MODES = ("lru", "active")
KNOWN = ({"COMPUTECACHE_MODE"} | SECRETS.keys() | OPTIONAL_SECRETS | WHOLE_NUMBERS.keys()) | (
    FRACTIONS | TEXTS
)

PLACEHOLDER = re.compile(
    r"replace|change.?(me|this|it)|^your|placeholder|example|^x{3,}|^todo|<.*>"
    r"|^(secret|password|admin|test|none|null)+$",
    re.IGNORECASE,
)
LINE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")
PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=-]*")
QUOTED = re.compile(r"(?P<quote>[\"'])(?P<text>[A-Za-z0-9_./:@%+,=# ?!*()<>;&|-]*)(?P=quote)")
QUOTED_JSON = re.compile(r"'(?P<text>\{[A-Za-z0-9_./:@%+,=\"{}\[\] -]*\})'")


def read_lines(data: bytes) -> tuple[dict[str, str | None], list[str]]:
    """Values by name, and faults. A line that readers would disagree about gives None."""
    values: dict[str, str | None] = {}
    faults: list[str] = []
    if data.startswith(b"\xef\xbb\xbf"):
        faults.append("line 1: the file starts with a byte order mark: save it as plain UTF-8")
        data = data[3:]
    if b"\r" in data:
        faults.append(
            "CRLF line ends: every value would end in an invisible \\r. "
            "Convert with: sed -i 's/\\r$//' .env"
        )
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for number, line in enumerate(data.decode(errors="replace").split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if not match:
            faults.append(f"line {number}: {not_an_assignment(line)}")
            continue
        name, raw = match["name"], match["value"]
        if name in values:
            faults.append(f"line {number}: {name} is set twice: keep one line")
        if PLAIN.fullmatch(raw):
            values[name] = raw
        elif quoted := QUOTED.fullmatch(raw) or QUOTED_JSON.fullmatch(raw):
            values[name] = quoted["text"]
        else:
            values[name] = None
            faults.append(f"line {number}: {name}: {not_read_alike(raw)}")
    return values, faults


def not_an_assignment(line: str) -> str:
    """Why `line` is not NAME=value. The line itself is not shown: it may hold a secret."""
    if line[0] in " \t":
        return "starts with a space: begin the line with the name"
    if line.startswith("export "):
        return "starts with `export`: write NAME=value alone"
    name = line.partition("=")[0]
    if "=" in line and re.fullmatch(r"[A-Za-z_]\w*[ \t]+", name):
        return f"{name.strip()}: space before `=`: a shell would run {name.strip()} as a command"
    return "is not NAME=value"


def not_read_alike(raw: str) -> str:
    """Why Compose and a shell would disagree about `raw`, without showing it."""
    if raw[0] in " \t" or raw[-1] in " \t":
        return "space around the value: remove it"
    if re.search(r"\s#", raw):
        return "comment behind the value: put it on a line of its own"
    if "$" in raw or "`" in raw:
        return "`$` or a backquote, which Compose and a shell expand: choose a value without"
    if "\\" in raw:
        return "a backslash, which Compose and a shell read differently: choose a value without"
    if "'" in raw or '"' in raw:
        return "quotes that Compose and a shell read differently: write the value without quotes"
    return "characters that a shell treats specially: use letters, digits and _./:@%+,=-"


def check_values(values: Mapping[str, str | None]) -> list[str]:
    """Faults of the values themselves; None stands for a value already found faulty."""
    faults = []
    for name, fewest in SECRETS.items():
        value = values.get(name, "")
        if value is not None and (fault := check_secret(value, fewest)):
            faults.append(f"{name} {fault} `openssl rand -hex 32`")
    key, password = (values.get(name) for name in SECRETS)
    if key and key == password:
        faults.append(f"{' and '.join(SECRETS)} are equal: make a second one")

    for name, value in values.items():
        if value is None or name in SECRETS or name in OPTIONAL_SECRETS:
            continue
        if fault := check_setting(name, value):
            faults.append(f"{name}={value!r} {fault}")
    return faults


def check_together(values: Mapping[str, str | None]) -> list[str]:
    """Faults of values that do not go together, with the defaults of what is not set."""
    return check_ports(values) + check_pool(values) + check_connector(values)


def check_ports(values: Mapping[str, str | None]) -> list[str]:
    """Faults of ports that two services would publish."""
    owners: dict[str, str] = {}
    faults = []
    for name, default in PORTS.items():
        port = values.get(name, default)
        if port and (other := owners.setdefault(port.lstrip("0"), name)) != name:
            faults.append(f"{other} and {name} are both {port}: give each service its own port")
    return faults


def check_pool(values: Mapping[str, str | None]) -> list[str]:
    """Faults of a longest request that vLLM would not start with; one block is never handed out."""
    if "compose.cpu.yaml" in (values.get("COMPOSE_FILE") or ""):
        values = CPU_POOL | {k: v for k, v in values.items() if k != "BLOCK_SIZE"}
    sizes = [values.get(name, default) or "" for name, default in POOL.items()]
    if not all(re.fullmatch(r"[0-9]{1,10}", size) for size in sizes):
        return []  # blank blocks mean the whole GPU; anything else is a fault of its own
    longest, blocks, block_size = map(int, sizes)
    if longest <= (room := (blocks - 1) * block_size):
        return []
    return [
        f"MAX_MODEL_LEN={longest} is more than the {room} tokens of (NUM_GPU_BLOCKS={blocks} - 1) "
        f"x BLOCK_SIZE={block_size}: lower it, or raise NUM_GPU_BLOCKS (blank: all of the GPU)"
    ]


def check_connector(values: Mapping[str, str | None]) -> list[str]:
    """Faults of a KV connector that the policy cannot share the free queue with."""
    config = transfer_config(values.get("KV_TRANSFER_CONFIG") or "")
    if values.get("COMPUTECACHE_MODE") != "active" or config is None:
        return []
    if not (lazy := lazy_connector(config)):
        return []
    return [
        f"COMPUTECACHE_MODE='active' and KV_TRANSFER_CONFIG: {lazy} stores lazily, by the order "
        "that the policy changes: the policy would switch itself off. Store eagerly, or use lru"
    ]


def transfer_config(value: str) -> dict | None:
    """The KV connector's configuration, or None if that is no JSON object that names one."""
    try:
        config = json.loads(value)
    except ValueError:
        return None
    return config if isinstance(config, dict) and config.get("kv_connector") else None


def lazy_connector(config: Mapping) -> str:
    """The connector of `config`, or within it, that stores what LRU would evict next."""
    extra = config.get("kv_connector_extra_config")
    if not isinstance(extra, dict):
        return ""
    if any(extra.get(setting) for setting in LAZY_SETTINGS):
        return config.get("kv_connector") or ""
    inner = [part for part in extra.get("connectors") or () if isinstance(part, dict)]
    return next(filter(None, map(lazy_connector, inner)), "")


def check_secret(value: str, fewest: int) -> str | None:
    """What is wrong with a secret, or None."""
    if not value.strip():
        return "is blank or missing: make one with"
    if PLACEHOLDER.search(value):
        return "is still a placeholder: make one with"
    if not re.fullmatch(r"[!-~]+", value):
        return "holds a space or an invisible character: make one with"
    if len(value) < fewest:
        return f"has fewer than {fewest} characters: make one with"
    return None


def check_setting(name: str, value: str) -> str | None:
    """What is wrong with one value that is no secret, or None."""
    if not value.strip():
        if name in BLANK_MEANS_SOMETHING:
            return None
        return "is blank: give a value, or remove the line to get the default"
    if name == "COMPUTECACHE_MODE":
        return None if value in MODES else "must be lru or active, in lower case"
    if name in WHOLE_NUMBERS:
        low, high = WHOLE_NUMBERS[name]
        if re.fullmatch(r"[0-9]{1,10}", value) and low <= int(value) <= high:
            return None
        return f"must be a whole number from {low} to {high}"
    if name in FRACTIONS:
        if re.fullmatch(r"[0-9]*\.?[0-9]+", value) and 0 < float(value) <= 1:
            return None
        return "must be above 0 and at most 1"
    if name == "PROMETHEUS_RETENTION":
        parts = RETENTION.fullmatch(value)
        spans = zip(parts.groups(), RETENTION_UNITS_S, strict=True) if parts else ()
        if 0 < sum(int(count or 0) * seconds for count, seconds in spans) < 100 * 365 * 86400:
            return None
        return "must be a time that Prometheus reads, as in 15d, 12h or 1w2d"
    if name == "VLLM_VERSION":
        wanted = " or ".join(VLLM_VERSIONS)
        return None if value in VLLM_VERSIONS else f"must be {wanted}: the patch knows no other"
    if name == "KV_TRANSFER_CONFIG":
        if transfer_config(value):
            return None
        return "must be a JSON object with a kv_connector, in single quotes in .env"
    if name.startswith("COMPUTECACHE_"):
        settings = sorted(known for known in KNOWN if known.startswith("COMPUTECACHE_"))
        return f"is no setting; there are {', '.join(settings)}"
    return None


def check_shell(values: Mapping[str, str | None], environ: Mapping[str, str]) -> list[str]:
    """Faults of a shell whose variables Compose takes instead of what the file says."""
    faults = []
    for name in sorted(environ.keys() & (KNOWN - {"SOURCE_REVISION"})):
        if environ[name] != values.get(name):
            instead = "its value in .env" if name in values else "the default"
            faults.append(
                f"{name} is exported in this shell and overrides {instead}: `unset {name}`"
            )
    for name in sorted(environ.keys() & COMPOSE.keys()):
        if environ[name] != values.get(name):
            faults.append(
                f"{name} is exported in this shell, and Compose then {COMPOSE[name]}: "
                f"`unset {name}`"
            )
    return faults


def check_compose_file(values: Mapping[str, str | None], folder: Path) -> list[str]:
    """Faults of COMPOSE_FILE in .env, which Compose obeys."""
    value = values.get("COMPOSE_FILE")
    if value is None:
        return []
    names = value.split(values.get("COMPOSE_PATH_SEPARATOR") or os.pathsep)
    missing = [name for name in names if not (folder / name).is_file()]
    if names[0] == "compose.yaml" and not missing:
        return []
    why = f"{', '.join(missing)} is not there" if missing else "compose.yaml is not the first"
    return [
        f"COMPOSE_FILE={value!r} is obeyed by Compose, but {why}: remove the line, or write "
        f"compose.yaml first (without a GPU: compose.yaml{os.pathsep}compose.cpu.yaml)"
    ]


def check_mounts(folder: Path) -> list[str]:
    """Faults of files that containers read as another user than their owner."""
    if os.name != "posix" or not (folder / "compose.yaml").is_file():
        return []
    missing = [name for name in MOUNTED if not (folder / name).exists()]
    faults = [f"{name} is missing, and compose.yaml mounts it: restore it" for name in missing]
    closed = [
        name
        for name in MOUNTED
        if any(not readable(path) for path in ((folder / name), *(folder / name).rglob("*")))
        and name not in missing
    ]
    if closed:
        names = " ".join(closed)
        faults.append(f"the containers' users cannot read {names}: `chmod -R a+rX {names}`")
    return faults


def readable(path: Path) -> bool:
    """Whether every user may read `path` and, if it is a folder, enter it."""
    wanted = 0o005 if path.is_dir() else 0o004
    return not path.exists() or path.stat().st_mode & wanted == wanted


def warnings_for(values: Mapping[str, str | None], path: Path) -> list[str]:
    """What is allowed but surprises."""
    warnings = []
    for name in sorted(values.keys() - KNOWN):
        if name in COMPOSE and name != "COMPOSE_ENV_FILES":
            warnings.append(f"{name} in {path} is obeyed by Compose: it {COMPOSE[name]}")
        elif not name.startswith("COMPUTECACHE_"):
            warnings.append(f"{name} is not used by compose.yaml")
    config = transfer_config(values.get("KV_TRANSFER_CONFIG") or "")
    if config and config.get("kv_load_failure_policy") != "recompute":
        warnings.append(
            "KV_TRANSFER_CONFIG without kv_load_failure_policy recompute: a load that fails "
            "fails the request"
        )
    if os.name == "posix" and path.stat().st_mode & 0o077:
        warnings.append(f"other users can read {path}: chmod 600 {path}")
    return warnings


def check_file(path: Path) -> tuple[dict[str, str | None], list[str]]:
    """Values and faults of a file. Raises OSError when it cannot be read."""
    values, faults = read_lines(path.read_bytes())
    return values, faults + check_values(values)


def check_environ(found_already: list[str]) -> list[str]:
    """Faults of what Compose handed over, but for those that the file has shown."""
    values = {k: v for k, v in os.environ.items() if k in KNOWN or k == "COMPOSE_FILE"}
    faults = check_values(values) + check_together(values)
    return [f"{fault} (as Compose read it)" for fault in faults if fault not in found_already]


def provide(arguments: list[str]) -> int:
    """Answer Compose, in the folder of compose.yaml: `up` goes on unless there is a fault."""
    if "up" not in arguments:
        return 0
    try:
        _, faults = check_file(Path(".env"))
        faults += check_mounts(Path()) + check_environ(faults)
    except OSError as error:
        faults = [f".env: {error.strerror}"]
    if faults:
        message = "\n".join(f"check_env: {fault}" for fault in faults)
        print(json.dumps({"type": "error", "message": message}))
    return 1 if faults else 0


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 accepted, 1 refused, 2 could not be read."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compose"]:
        return provide(argv)
    parser = argparse.ArgumentParser(description="Check .env before docker compose up.")
    parser.add_argument("--env-file", type=Path, metavar="FILE", help="default: .env")
    parser.add_argument(
        "--environ",
        action="store_true",
        help="in a container: check this process's environment, and the file only if it is named",
    )
    args = parser.parse_args(argv)

    checked: list[str] = []
    warnings: list[str] = []
    faults: list[str] = []
    path = args.env_file or (None if args.environ else Path(".env"))
    if path is not None:
        try:
            values, faults = check_file(path)
        except OSError as error:
            print(
                f"check_env: {path}: {error.strerror}. "
                "Start with: cp .env.example .env && chmod 600 .env",
                file=sys.stderr,
            )
            return 2
        checked.append(str(path))
        if not args.environ:
            faults += (
                check_together(values)
                + check_compose_file(values, path.parent)
                + check_mounts(path.parent)
            )
            faults += check_shell(values, os.environ)
            warnings = warnings_for(values, path)
    if args.environ:
        faults += check_environ(faults)
        checked.append("environment")

    for fault in faults:
        print(f"check_env: {fault}", file=sys.stderr)
    for warning in warnings:
        print(f"check_env: warning: {warning}", file=sys.stderr)
    accepted = not faults
    print(
        json.dumps(
            {
                "checked": ", ".join(checked),
                "accepted": accepted,
                "faults": faults,
                "warnings": warnings,
            }
        )
    )
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main())
