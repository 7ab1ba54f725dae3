"""Bytes to and from a port, counted by the kernel's packet filter: exact, and without a proxy's cost."""

import json
import subprocess

from .process import Failed, program, sh


class Traffic:
    """Counts the packets of one TCP port on this machine, headers included. Without `nft`, counts nothing."""

    def __init__(self, port: int) -> None:
        self.table = f"rfs_bench_{port}"
        self.nft = program("nft")
        if not self.nft:
            return
        rules = f"""table inet {self.table} {{
            counter up {{}}
            counter down {{}}
            chain count {{
                type filter hook input priority 0;
                tcp dport {port} counter name "up"
                tcp sport {port} counter name "down"
            }}
        }}"""
        done = subprocess.run([self.nft, "-f", "-"], input=rules, text=True, capture_output=True, check=False)
        if done.returncode:
            self.nft = None

    def bytes(self) -> tuple[int, int] | None:
        """Bytes sent to the port and from it so far; None where they cannot be counted."""
        if not self.nft:
            return None
        found = json.loads(sh(self.nft, "--json", "list", "counters", "table", "inet", self.table))["nftables"]
        counters = {item["counter"]["name"]: item["counter"]["bytes"] for item in found if "counter" in item}
        return counters["up"], counters["down"]

    def close(self) -> None:
        """Removes the rules."""
        if self.nft:
            try:
                sh(self.nft, "delete", "table", "inet", self.table)
            except Failed:
                pass  # somebody flushed all rules
