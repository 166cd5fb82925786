"""A network on one machine: each rank in a network namespace of its own, with a link of the rate and latency that you
give it.

    python tools/netlab.py --ranks 2 --rate 1gbit -- tools/bench/overlap.py --child
    python tools/netlab.py --ranks 4 --rate 1gbit,1gbit,1gbit,100mbit --latency 200us -- examples/two_dim.py

Runs ``python SCRIPT`` once per rank, with the environment of ``torchrun`` and gloo on the link, and prints the bytes
that crossed each link (counters of its interface, headers of TCP and Ethernet included) when all have ended.

    namespace of a rank              namespace of the switch
    eth0 10.77.0.<rank + 1> ──────── p<rank> ─ bridge       (a veth pair a rank; `tc` holds both ends of it to the rate)

All of it is made in namespaces of this process, so nothing else on the machine sees a packet of it, and it is removed
when the process ends; what a killed one left behind is removed by the next. Needs root, ``ip`` and ``tc`` (package
iproute2), and for a latency the kernel's ``sch_netem``: where one is missing the exit status is 2 and the message says
which. In Python it is `Network`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

#: Namespaces are called so, then the id of the process that made them.
PREFIX = "dtclab"
PORT = 29571
#: What `tc` lets through at once. A segment that the network card would cut (64 KiB) has to fit.
BURST = "192kb"


class UnavailableError(RuntimeError):
    """This machine does not let us make networks; the message says what is missing."""


class RunError(RuntimeError):
    """A rank failed, or the time was up."""


@dataclass(frozen=True)
class Traffic:
    """Bytes and packets that a rank's interface sent and received."""

    sent: int
    received: int
    packets_sent: int


@dataclass
class Network:
    """`ranks` network namespaces on one switch, there while the context is entered.

    Attributes:
        rate: of each link, in the words of `tc` ("1gbit"); one for all ranks or one each. Empty: as fast as the
            machine.
        latency: one way, of each link ("200us"); empty for none.

    Raises (on entry):
        UnavailableError: no root, no `ip` or `tc`, or the kernel lacks what is asked for.
    """

    ranks: int
    rate: Sequence[str] = ()
    latency: Sequence[str] = ()
    name: str = field(default_factory=lambda: f"{PREFIX}{os.getpid()}")

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise UnavailableError("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"{tool} is missing: install the package iproute2")
        remove_left_over()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def namespace(self, rank: int) -> str:
        return f"{self.name}r{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.{(rank + 1) // 250}.{(rank + 1) % 250}"

    def environment(self, rank: int) -> dict[str, str]:
        """What ``torchrun`` would set, and gloo on the link."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
        }

    def traffic(self) -> list[Traffic]:
        """Per rank, what its interface carried since it was made."""
        result = []
        for rank in range(self.ranks):
            shown = json.loads(_do("ip", "-n", self.namespace(rank), "-j", "-s", "link", "show", "eth0"))[0]["stats64"]
            result.append(Traffic(shown["tx"]["bytes"], shown["rx"]["bytes"], shown["tx"]["packets"]))
        return result

    def set_rate(self, rate: Sequence[str], latency: Sequence[str] = ()) -> None:
        """Another rate and latency for the links that are there; also while something runs on them."""
        for rank in range(self.ranks):
            this, delay = _of(rate, rank), _of(latency, rank)
            for space, device in ((self.namespace(rank), "eth0"), (f"{self.name}s", f"p{rank}")):
                tc = ["tc", "-n", space, "qdisc"]
                _do(*tc, "del", "dev", device, "root", check=False)
                if this:
                    _do(
                        *tc,
                        "add",
                        "dev",
                        device,
                        *f"root handle 1: tbf rate {this} burst {BURST} latency 100ms".split(),
                    )
                if delay and device == "eth0":
                    place = "parent 1:1 handle 10:" if this else "root"
                    _do(*tc, "add", "dev", device, *f"{place} netem delay {delay} limit 100000".split())

    def run(self, command: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None) -> None:
        """`command` on every rank at once, each in its namespace. Returns when all have ended well.

        Raises:
            RunError: a rank ended with another status than 0, or `timeout` seconds have passed. The others are ended.
        """
        processes = []
        try:
            for rank in range(self.ranks):
                env = {**os.environ, **(environment or {}), **self.environment(rank)}
                inside = ["ip", "netns", "exec", self.namespace(rank), *command]
                process = subprocess.Popen(inside, env=env, preexec_fn=_end_with_parent)  # noqa: PLW1509 - one thread
                processes.append(process)
            _wait(processes, timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def _make(self) -> None:
        switch = f"{self.name}s"
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank in range(self.ranks):
            space = self.namespace(rank)
            _do("ip", "netns", "add", space)
            _do("ip", "-n", switch, "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _do("ip", "-n", space, "address", "add", f"{self.address(rank)}/16", "dev", "eth0")
            for where, device in ((space, "lo"), (space, "eth0"), (switch, f"p{rank}")):
                _do("ip", "-n", where, "link", "set", device, "addrgenmode", "none", check=False)
                _do("ip", "-n", where, "link", "set", device, "up")
            _do("ip", "-n", switch, "link", "set", f"p{rank}", "master", "bridge")
        self.set_rate(self.rate, self.latency)

    def _remove(self) -> None:
        for space in (*(self.namespace(rank) for rank in range(self.ranks)), f"{self.name}s"):
            _do("ip", "netns", "del", space, check=False)


def remove_left_over() -> None:
    """Removes the namespaces of processes that are gone."""
    for space in pathlib.Path("/run/netns").glob(f"{PREFIX}*"):
        made_by = re.match(rf"{PREFIX}(\d+)[rs]", space.name)
        if made_by and not pathlib.Path(f"/proc/{made_by[1]}").exists():
            _do("ip", "netns", "del", space.name, check=False)


def _of(values: Sequence[str], rank: int) -> str:
    return values[rank] if len(values) > 1 else values[0] if values else ""


def _do(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        message = done.stderr.strip()
        if "qdisc kind is unknown" in message:
            module = "sch_netem" if "netem" in command else "sch_tbf"
            raise UnavailableError(f"the kernel has no {module}, which `{' '.join(command)}` needs")
        raise UnavailableError(f"`{' '.join(command)}` failed: {message}")
    return done.stdout


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Until all have ended; one that fails leaves the others a few seconds to say what they saw."""
    deadline, failed = time.monotonic() + timeout, ""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise RunError(failed or f"not done after {timeout:g} s")
        bad = next((rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)), None)
        if bad is not None and not failed:
            failed = f"rank {bad} ended with status {processes[bad].returncode}"
            deadline = min(deadline, time.monotonic() + 10.0)
        time.sleep(0.02)
    bad = next((rank for rank, process in enumerate(processes) if process.returncode), None)
    if bad is not None:
        raise RunError(failed or f"rank {bad} ended with status {processes[bad].returncode}")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal that would end the process at once raises, so that what it made is removed."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rate", default="1gbit", help="of every link, or one each with commas; as tc writes it; '' for no limit"
    )
    parser.add_argument("--latency", default="", help="one way, likewise (200us)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--json", metavar="FILE", help="write the bytes per link there too")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENTS")
    args = parser.parse_args()
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    rate, latency = ([part for part in text.split(",") if part] for text in (args.rate, args.latency))
    if not script or any(len(given) not in (0, 1, args.ranks) for given in (rate, latency)):
        parser.error("give a script, and one rate and latency for all ranks or one each")
    with _ended_by_signals():
        try:
            with Network(args.ranks, rate, latency) as network:
                began = time.monotonic()
                network.run([sys.executable, *script], timeout=args.timeout)
                seconds, traffic = time.monotonic() - began, network.traffic()
        except UnavailableError as error:
            print(f"netlab: {error}", file=sys.stderr)
            return 2
        except RunError as error:
            print(f"netlab: {error}", file=sys.stderr)
            return 1
    table = Table(title=f"{args.ranks} ranks, {args.rate or 'no limit'}, {seconds:.1f} s")
    for column in ("rank", "bytes sent", "bytes received", "packets sent"):
        table.add_column(column, justify="right")
    for rank, this in enumerate(traffic):
        table.add_row(str(rank), f"{this.sent:,}", f"{this.received:,}", f"{this.packets_sent:,}")
    Console().print(table)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"seconds": seconds, "links": [vars(this) for this in traffic]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
