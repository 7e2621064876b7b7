# SPDX-License-Identifier: Apache-2.0
"""Several servers side by side, started, adopted and ended; processes that sleep stand in."""

import sys
import time
from dataclasses import replace
from subprocess import Popen

from servers import fleet as fleet_module
from servers.processes import alive, reap, stop_group


def test_servers_that_are_not_needed_make_room(sleepers):
    a, b, c, big = sleepers.specs
    sleepers.start([a, b, c])
    pids = {key: one.pid for key, one in sleepers.running.items()}
    sleepers.start([c, big])
    assert set(sleepers.running) == {"g:c", "g:big"}
    assert sleepers.running["g:c"].pid == pids["g:c"]
    assert not alive(pids["g:a"])
    assert not alive(pids["g:b"])


def test_ports_of_running_servers_differ(sleepers):
    sleepers.start(sleepers.specs[:3])
    ports = [p for one in sleepers.running.values() for p in (one.port, one.port + 1)]
    assert len(set(ports)) == 6


def test_a_later_call_adopts_what_still_runs(sleepers, tmp_path):
    sleepers.start(sleepers.specs[:2])
    gone = sleepers.running["g:a"].pid
    stop_group(gone, 5)
    reap(gone)
    later = fleet_module.Fleet(sleepers.specs, tmp_path / "fleet", {}, {}, 12)
    later.adopt()
    assert set(later.running) == {"g:b"}


def test_a_server_that_dies_while_starting_is_run_in_a_plainer_way_once(
    sleepers, monkeypatch, tmp_path
):
    timed = replace(sleepers.specs[0], execution=0)
    commands = []

    def die(command, **more):
        commands.append(command)
        return Popen([sys.executable, "-c", "print('no such kernel')"], **more)

    monkeypatch.setattr(fleet_module.subprocess, "Popen", die)
    sleepers.start([timed])
    sleepers.wait([timed], time.monotonic() + 60)
    assert "no such kernel" in sleepers.lost["g:a"]
    assert len(commands) == 2
    assert "--compilation-config" not in commands[0]
    assert "--compilation-config" in commands[1]
