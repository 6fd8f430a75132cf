"""Names and ports: does this machine know itself and the others, and are ports free?"""

from __future__ import annotations

import errno
import ipaddress
import socket

import psutil

from megarl.doctor.node.finding import Finding, Status
from megarl.doctor.node.needs import Needs


def check_hostname(needs: Needs) -> Finding:
    """Whether this machine's own name resolves, to an address that other machines reach where there are some."""
    host = socket.gethostname()
    remedy = f"add `<address> {host}` to /etc/hosts, or repair DNS"
    try:
        addresses = resolve(host)
    except OSError as error:
        return Finding("hostname", Status.FAIL, f"{host} does not resolve ({error.strerror or error})", remedy)
    found = f"{host} is {', '.join(addresses)}"
    if needs.nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return Finding("hostname", Status.WARN, f"{found}: other nodes cannot reach that", remedy)
    return Finding("hostname", Status.PASS, found)


def check_peers(needs: Needs) -> list[Finding]:
    """Whether the names of the other machines resolve here."""
    if not needs.peers:
        return []
    missing = []
    for peer in needs.peers:
        try:
            resolve(peer)
        except OSError as error:
            missing.append(f"{peer} ({error.strerror or error})")
    if missing:
        found = f"cannot be resolved: {', '.join(missing)}"
        return [Finding("names of other nodes", Status.FAIL, found, "repair DNS, or list all nodes in /etc/hosts")]
    return [Finding("names of other nodes", Status.PASS, f"{len(needs.peers)} resolve")]


def resolve(host: str) -> list[str]:
    """Addresses of a name.

    Raises:
        OSError: it has none.
    """
    return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})


def check_ports(needs: Needs) -> list[Finding]:
    """Whether ports are free; with who holds them where this user may know it."""
    findings = []
    for port in needs.ports:
        holder = port_holder(port)
        remedy = f"end what holds it, or choose another port than {port}" if holder else ""
        found = f"{port} is {f'held by {holder}' if holder else 'free'}"
        findings.append(Finding("port", Status.FAIL if holder else Status.PASS, found, remedy))
    held = [(port, holder) for port in needs.watched_ports if port not in needs.ports and (holder := port_holder(port))]
    if held:
        found = "; ".join(f"{port} is held by {holder}" for port, holder in held)
        remedy = "a Ray cluster runs here already: join it (RAY_ADDRESS), or give the new one other ports"
        findings.append(Finding("Ray's ports", Status.WARN, found, remedy))
    elif needs.watched_ports:
        findings.append(Finding("Ray's ports", Status.PASS, f"{', '.join(map(str, needs.watched_ports))} are free"))
    return findings


def port_holder(port: int) -> str | None:
    """Who listens on a port, None where it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free
        try:
            tried.bind(("", port))
            return None
        except OSError as error:
            if error.errno == errno.EACCES:
                return "the system, which gives it to root only"
    try:
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
                return f"process {entry.pid} ({psutil.Process(entry.pid).name()})"
    except psutil.Error:
        pass
    return "a process of another user"
