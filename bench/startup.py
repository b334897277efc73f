"""Start-up seconds and memory of `deepserve serve`, or of a cluster on this machine, with the shipped model.

    python bench/startup.py [--runs 5] [--json FILE] [-- flags of deepserve serve]
    python bench/startup.py --cluster examples/laptop-pd.toml [--runs 5] [--json FILE]

Ready: the first moment at which the server says so, that is, all engines have registered. First answer: a chat reply of 12 tokens read
in full. Memory: resident sets once ready, summed over processes, so pages that they share (the interpreter, libraries) count
more than once; the proportional set counts each once.
"""

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
import urllib.request

import psutil

QUESTION = {"model": "deepserve-tiny", "messages": [{"role": "user", "content": "What is 12+30?"}], "temperature": 0}


def one_run(command: list[str]) -> dict[str, float]:
    """Start, ask, stop."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = ""
        for line in process.stderr:
            found = re.search(r"listening on (\S+)", line)
            url = found[1] if found else url
            if line.rstrip().endswith("deepserve: ready"):
                break
        else:
            raise SystemExit("the server ended before it was ready")
        ready_s = time.perf_counter() - started
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        memory = [p.memory_full_info() for p in processes]
        frontend = next((idx for idx, p in enumerate(processes) if "launch.frontend" in p.cmdline()), 0)
        request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(QUESTION).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            assert "42" in json.load(reply)["choices"][0]["message"]["content"]
        return {
            "ready, s": ready_s,
            "first answer, s": time.perf_counter() - started,
            "processes": len(processes),
            "resident, MB": sum(m.rss for m in memory) / 1e6,
            "proportional, MB": sum(m.pss for m in memory) / 1e6,
            "frontend resident, MB": memory[frontend].rss / 1e6,
        }
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs, after one that warms the file cache")
    parser.add_argument("--cluster", help="cluster file, instead of deepserve serve")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("flags", nargs="*", help="flags of deepserve serve, behind --")
    args = parser.parse_args()
    serve = ["deepserve", "serve", "--port", "0", *args.flags]
    what = serve if args.cluster is None else ["launch", "up", args.cluster]
    runs = [one_run([sys.executable, "-m", *what]) for _ in range(args.runs + 1)][1:]
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    spread = {name: [min(run[name] for run in runs), max(run[name] for run in runs)] for name in runs[0]}
    machine = f"Python {platform.python_version()}, {psutil.cpu_count()} cores"
    print(f"{' '.join(what)}: median of {args.runs} runs, {machine}")
    for name, value in figures.items():
        print(f"  {name:<24}{value:>10.2f}   ({spread[name][0]:.2f} to {spread[name][1]:.2f})")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"command": what, "runs": args.runs, "median": figures, "min_max": spread}, file, indent=1)


if __name__ == "__main__":
    main()
