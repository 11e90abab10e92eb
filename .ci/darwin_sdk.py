#!/usr/bin/env python3
"""The least of an SDK that lld needs to link a Metal program, and a look at what came of it.

    darwin_sdk.py DIR                    writes an SDK to DIR
    darwin_sdk.py --program FILE NAME..  checks a linked program; it must load the frameworks named

An SDK here is lists of symbols: no code, no headers. The list of libSystem is that of the package ziglang, which
makes the link a check against what macOS has. Those of the Objective-C runtime and of the frameworks are below, by
hand: a function that is used for the first time must be added, after a look whether macOS really has it.
"""

import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zipfile

ZIGLANG = "ziglang==0.17.1"
LIST = "ziglang/lib/libc/darwin/libSystem.tbd"

OBJC = """
_class_addIvar _class_addMethod _class_addProtocol _class_getInstanceMethod _class_getName _class_isMetaClass
_method_getName _method_getTypeEncoding _object_getClass _objc_alloc _objc_alloc_init _objc_allocateClassPair
_objc_autorelease _objc_autoreleasePoolPop _objc_autoreleasePoolPush _objc_autoreleaseReturnValue _objc_getClass
_objc_getProtocol _objc_lookUpClass _objc_msgSend _objc_opt_class _objc_registerClassPair _objc_release _objc_retain
_objc_retainAutoreleasedReturnValue _sel_getName _sel_registerName
"""
# Path below the SDK, install name on a Mac, symbols.
BY_HAND = [
    ("usr/lib/libobjc.tbd", "/usr/lib/libobjc.A.dylib", OBJC),
    ("usr/lib/libiconv.tbd", "/usr/lib/libiconv.2.dylib", "_iconv _iconv_open _iconv_close"),
] + [
    (
        f"System/Library/Frameworks/{name}.framework/{name}.tbd",
        f"/System/Library/Frameworks/{name}.framework/Versions/{version}/{name}",
        symbols,
    )
    for name, version, symbols in [
        ("Metal", "A", "_MTLCreateSystemDefaultDevice _MTLCopyAllDevices"),
        ("Foundation", "C", "_NSCocoaErrorDomain"),
        ("CoreFoundation", "A", "_CFRelease _CFRetain"),
        ("CoreGraphics", "A", "_CGMainDisplayID"),
    ]
]


def lib_system():
    """The list of libSystem, for arm64 (the package names arm64e alone, lld links arm64)."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run(pip + [ZIGLANG], check=True)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        text = zipfile.ZipFile(wheel).read(LIST).decode()
    # Of a list of targets without arm64 but with arm64e, arm64e becomes arm64; later variants go.
    text = re.sub(r"\barm64e\.[a-z0-9]+-\w+,?\s*", "", text)
    return re.sub(r",(\s*\])", r"\1", re.sub(r"\barm64e-", "arm64-", text))


def write_sdk(sdk):
    done = sdk / ".made-by"
    want = ZIGLANG + repr(BY_HAND)
    if done.exists() and done.read_text() == want:
        return
    lib = sdk / "usr/lib"
    lib.mkdir(parents=True, exist_ok=True)
    (lib / "libSystem.tbd").write_text(lib_system())
    for name in ["libc", "libm", "libpthread", "libdl"]:
        link = lib / f"{name}.tbd"
        link.unlink(missing_ok=True)
        link.symlink_to("libSystem.tbd")
    (sdk / "SDKSettings.json").write_text('{"Version":"15.0"}\n')
    for path, install_name, symbols in BY_HAND:
        file = sdk / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
            f"install-name: '{install_name}'\nexports:\n  - targets: [ arm64-macos ]\n"
            f"    symbols: [ {', '.join(symbols.split())} ]\n...\n"
        )
    done.write_text(want)


LC_LOAD_DYLIB, LC_CODE_SIGNATURE, LC_BUILD_VERSION = 0xC, 0x1D, 0x32


def check_program(path, frameworks):
    data = path.read_bytes()
    magic, cpu, _, kind, commands = struct.unpack_from("<5I", data)
    assert (magic, cpu, kind) == (0xFEEDFACF, 0x0100000C, 2), "no arm64 Mach-O program"
    loads, seen, at = [], {}, 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        seen[command] = at
        if command == LC_LOAD_DYLIB:
            (name,) = struct.unpack_from("<I", data, at + 8)
            loads.append(data[at + name : at + size].split(b"\0")[0].decode())
        at += size
    assert LC_CODE_SIGNATURE in seen, "a Mac starts nothing that is not signed"
    platform, oldest = struct.unpack_from("<2I", data, seen[LC_BUILD_VERSION] + 8)
    assert platform == 1, "not for macOS"
    for name in frameworks:
        assert any(f"/{name}.framework/" in load for load in loads), f"{name} is not loaded: {loads}"
    print(f"{path.name}: {len(data)} bytes, macOS {oldest >> 16}.{oldest >> 8 & 255}, signed; never started")
    print("  loads " + " ".join(pathlib.PurePath(load).name for load in loads))


if __name__ == "__main__":
    if sys.argv[1] == "--program":
        check_program(pathlib.Path(sys.argv[2]), sys.argv[3:])
    else:
        write_sdk(pathlib.Path(sys.argv[1]))
