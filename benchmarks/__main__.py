"""`python -m benchmarks [section ...] [--quick]`: prints tables, writes benchmarks/output/."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

from benchmarks import (
    alternatives,
    compiled,
    decoding,
    fixed,
    gpu,
    host,
    jax_calls,
    lp_map,
    memory,
    passes,
    speed,
    structured,
)

OUTPUT = Path(__file__).parent / "output"


def main() -> None:
    sections = {
        "passes": passes.run,
        **speed.SECTIONS,
        **fixed.SECTIONS,
        **compiled.SECTIONS,
        **structured.SECTIONS,
        **alternatives.SECTIONS,
        **memory.SECTIONS,
        **lp_map.SECTIONS,
        **decoding.SECTIONS,
        **gpu.SECTIONS,
        **host.SECTIONS,
        **jax_calls.SECTIONS,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("section", nargs="*", choices=[[], *sections], help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    record: dict[str, object] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()}
    }
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for name in args.section or sections:
        text, numbers = sections[name](args.quick)
        print(text, flush=True)
        record[name] = numbers
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / "results.json").write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
