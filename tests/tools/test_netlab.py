"""The network lab: what crosses a link is counted and held to its rate, and nothing is left behind however it ends."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.tools import TOOLS, load_tool

netlab = load_tool("netlab")

#: Rank 0 sends BYTES to rank 1, which answers when it has them.
SEND = """
import os, socket, sys, time
count, rank = int(sys.argv[1]), int(os.environ["RANK"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 1:
    for _ in range(100):
        try:
            s = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    left = count
    while left:
        left -= len(s.recv(min(left, 1 << 16)))
    s.sendall(b"x")
elif rank == 0:
    server = socket.create_server(address)
    s, _ = server.accept()
    began = time.monotonic()
    s.sendall(bytes(count))
    s.recv(1)
    print("seconds", time.monotonic() - began, flush=True)
"""


@pytest.fixture(scope="module")
def available():
    try:
        with netlab.Network(2, ["1gbit"]):
            pass
    except netlab.UnavailableError as error:
        pytest.skip(str(error))


def spaces():
    folder = pathlib.Path("/run/netns")
    return [path.name for path in folder.glob(f"{netlab.PREFIX}{os.getpid()}[rs]*")] if folder.exists() else []


def test_bytes_are_counted_and_held_to_the_rate(available, capfd):
    with netlab.Network(2, ["40mbit"]) as network:
        network.run([sys.executable, "-c", SEND, "2000000"], timeout=30)
        first, second = network.traffic()
    assert 2_000_000 < first.sent < 2_200_000 and first.sent == pytest.approx(second.received, abs=2000)
    assert second.sent < 200_000
    seconds = float(capfd.readouterr().out.split()[1])
    assert seconds > (2_000_000 - 400_000) * 8 / 40e6  # two bursts go through at once
    assert spaces() == []


@pytest.mark.slow
def test_a_failing_rank_ends_the_others(available):
    began = time.monotonic()
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    with pytest.raises(netlab.RunError, match="rank 1 ended with status 3"), netlab.Network(2) as network:
        network.run([sys.executable, "-c", script], timeout=50)
    assert time.monotonic() - began < 30 and spaces() == []


def test_a_run_is_bounded(available):
    with pytest.raises(netlab.RunError, match="not done after 0.5 s"), netlab.Network(2) as network:
        network.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)
    assert spaces() == []


def test_a_killed_lab_is_removed_by_the_next(available):
    code = (
        f"import sys, time; sys.path.insert(0, {str(TOOLS)!r}); import netlab\n"
        "with netlab.Network(2):\n  print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = pathlib.Path(f"/run/netns/{netlab.PREFIX}{process.pid}r0")
    assert left.exists()
    netlab.remove_left_over()
    assert not left.exists()


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(netlab.UnavailableError, match="need root"), netlab.Network(2):
        pass
