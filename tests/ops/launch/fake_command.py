#!/usr/bin/env python3
"""Fake ssh, srun, sbatch or scontrol, selected by the name of the program.

It logs its arguments, and runs the remote command on this machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
call = {"name": name, "arguments": arguments}
if name == "sbatch":
    call["input"] = sys.stdin.read()
with Path(os.environ["FAKE_CALLS"]).open("a", encoding="utf-8") as file:
    file.write(json.dumps(call) + "\n")

if name == "scontrol":
    assert arguments[:2] == ["show", "hostnames"], arguments
    print("\n".join(arguments[2].replace("local[2-3]", "127.0.0.2 127.0.0.3").split()))
elif name == "ssh":
    host, command = arguments[-2:]
    if host == "unreachable":
        print("ssh: Could not resolve hostname unreachable", file=sys.stderr)
        sys.exit(255)
    print("Welcome to this machine")  # a login message
    sys.stdout.flush()
    # as sshd: in a shell, until the connection ends
    sys.exit(subprocess.call(["sh", "-c", command]))
elif name == "srun":
    first = next(index for index, word in enumerate(arguments) if not word.startswith("-"))
    os.execvp(arguments[first], arguments[first:])
elif name == "sbatch":
    if "partition=nowhere" in call["input"]:
        print("sbatch: error: invalid partition specified: nowhere", file=sys.stderr)
        sys.exit(1)
    print("4711")
