#!/usr/bin/env python3
"""Whether GitHub's workflows are YAML, and run what there is: nobody here can start them.

    workflows.py FOLDER    FOLDER holds PyYAML, where it is not installed anyway
"""

import pathlib
import re
import shlex
import sys

sys.path.append(sys.argv[1])
import yaml


def packages():
    manifests = pathlib.Path("crates").glob("*/Cargo.toml")
    names = {m.parent: re.search(r'^name = "(.+)"', m.read_text(), re.M) for m in manifests}
    return {name.group(1): folder for folder, name in names.items() if name}


def check_command(line, known):
    words = shlex.split(line)
    folder = None
    for flag, value in zip(words, words[1:]):
        if flag == "--":
            break
        if flag == "-p":
            assert value in known, f"no package {value}"
            folder = known[value]
        if flag in ("--example", "--test"):
            file = folder / f"{flag[2:]}s" / f"{value}.rs"
            assert file.exists(), f"no {file}"


def check(path, known):
    workflow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as true.
    assert workflow.get("on", workflow.get(True)), "it never starts"
    commands = 0
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] and job["steps"], name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), f"{name}: neither a command nor an action: {step}"
            for line in step.get("run", "").replace("\\\n", " ").splitlines():
                if line.strip().startswith("cargo "):
                    check_command(line, known)
                    commands += 1
    assert commands, "no cargo command was found"
    print(f"{path}: {commands} cargo commands; never run here")


if __name__ == "__main__":
    found = sorted(pathlib.Path(".github/workflows").glob("*.y*ml"))
    assert found, "no workflows"
    for path in found:
        check(path, packages())
