# SPDX-License-Identifier: Apache-2.0
"""How a command ends when what is around it is broken: no stdout, no terminal, a bug."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from serving.command import run_command
from serving.console import say

def main():
    {body}

sys.exit(run_command(main, result={result!r}))
"""


def program(body, result="on stdout"):
    return [sys.executable, "-c", PROGRAM.format(body=body, result=result), str(SCRIPTS)]


def run(body, result="on stdout", **options):
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE} | options
    return subprocess.run(program(body, result), text=True, check=False, timeout=60, **options)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ZeroDivisionError('what\\nnow')", "ZeroDivisionError: what now (at <string>:"),
        ("raise RecursionError", "RecursionError (at"),
        ("raise MemoryError", "not enough memory"),
        ("raise KeyboardInterrupt", "interrupted"),
        ("raise ExceptionGroup('two', [ValueError()])", "ExceptionGroup: two"),
    ],
)
def test_what_nobody_foresaw_is_2_and_one_line(body, said):
    done = run(body)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("code", [0, 1, 2])
def test_what_main_returns_is_the_exit_code(code):
    assert run(f"return {code}").returncode == code


@pytest.mark.parametrize(("result", "code"), [("on stdout", 2), ("in --out", 1)])
@pytest.mark.parametrize("how", ["closed", "full", "a pipe nobody reads"])
def test_a_stdout_that_takes_nothing(how, result, code):
    body = "print('x' * 100_000); return 1"
    if how == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *program(body, result)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    elif how == "full":
        with open("/dev/full", "w") as full:
            done = run(body, result, stdout=full)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        done = run(body, result, stdout=writer)
        os.close(writer)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert ("the result cannot be written on stdout" in done.stderr) == (code == 2)


def test_without_a_stderr_what_has_to_be_finished_is(tmp_path):
    done_file = tmp_path / "done"
    body = f"say('x'); open({str(done_file)!r}, 'w').write('yes'); print('a result'); return 0"
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *program(body)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stdout == "a result\n", "what is meant for stderr is not among it"
    assert done_file.read_text() == "yes"


def test_a_terminal_that_is_lost_does_not_end_the_way_back(tmp_path):
    """As with an SSH session that breaks: HUP, and every write fails from then on."""
    begun, done_file = tmp_path / "begun", tmp_path / "done"
    body = (
        "from drills.signals import Interrupted, signals_as_interruption\n"
        "    with signals_as_interruption():\n"
        f"        open({str(begun)!r}, 'w').close()\n"
        "        try:\n"
        "            signal.pause()\n"
        "        except Interrupted as name:\n"
        "            for _ in range(3): say(f'{name}: back to lru'); print('x', flush=True)\n"
        f"            open({str(done_file)!r}, 'w').write(str(name))\n"
        "    return 2"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        program(body, "in --out"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    os.close(theirs)
    wait_for(begun, process)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 2
    assert done_file.read_text() == "SIGHUP"


@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "nohup"])
def test_hup_stays_ignored_where_it_was(tmp_path, ignored):
    begun = tmp_path / "begun"
    body = (
        "from drills.signals import Interrupted, ignore_signals, signals_as_interruption\n"
        "    with signals_as_interruption():\n"
        f"        open({str(begun)!r}, 'w').close()\n"
        "        try:\n"
        "            signal.pause()\n"
        "        except Interrupted as name:\n"
        "            ignore_signals()\n"
        "            ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
        "            print(name, ignored)\n"
        "    return 2"
    )
    process = subprocess.Popen(
        program(body),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL
        ),
    )
    wait_for(begun, process)
    process.send_signal(signal.SIGHUP)
    if ignored:
        process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert said == ("SIGTERM True\n" if ignored else "SIGHUP False\n")


@pytest.mark.parametrize("name", ["canary.py", "prefix_pressure.py", "tune_scan_limit.py"])
def test_a_python_without_the_packages_is_2_and_told_which(name):
    command = [sys.executable, "-S", str(SCRIPTS / name), "--help"]  # -S: no installed packages
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert (
        "has no dotenv, httpx, numpy, prometheus_client: run `bash scripts/setup_env" in done.stderr
    )
    assert "Traceback" not in done.stderr


# Alone in their images: they import nothing of serving/.
APART = {"check_env.py", "make_model.py"}


@pytest.mark.parametrize(
    "path", [p for p in sorted(SCRIPTS.glob("*.py")) if p.name not in APART], ids=lambda p: p.name
)
def test_every_command_ends_through_the_one_last_handler(path):
    assert "\n    sys.exit(run_command(main" in path.read_text()


def wait_for(file, process):
    while not file.exists():
        assert process.poll() is None
        os.sched_yield()
