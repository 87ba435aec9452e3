"""Bad command lines, by command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.hostile.case import DONE, FAILED, USAGE, Case, cli

T = "m.py:make"
OUT = ("-o", "o.onnx")
#: Texts that a terminal, rich's markup, a path or a shell takes for something else.
STRANGE = {
    "escape": "\x1b[31mred\x1b[0m",
    "osc": "\x1b]0;title\x07",
    "c1": "\x9b31m",
    "bell": "\x07\x08\x7f",
    "newline": "one\ntwo",
    "return": "kept\rlost",
    "markup": "[bold]x[/bold]",
    "open-markup": "[/nothing-is-open]",
    "link": "[link=file:///etc/passwd]x[/link]",
    "html": "<script>alert(1)</script>",
    "rtl": "abc\u202egpj.exe",
    "separator": "a\u2028b",
    "surrogate": "bad\udcff\udcfe",
    "percent": "%s%n%d{0}{x.__class__}",
    "long": "n" * 100_000,
    "empty": "",
    "space": "   ",
    "dash": "-",
    "dots": "..",
    "slash": "/",
    "emoji": "🦄" * 3,
}
_NO_FILE = {
    "escape",
    "osc",
    "c1",
    "bell",
    "newline",
    "return",
    "markup",
    "open-markup",
    "link",
    "rtl",
    "separator",
    "surrogate",
}


def _text(path: str, text: str) -> Any:
    return lambda folder: (folder / path).write_text(text)


def _bytes(path: str, content: bytes) -> Any:
    return lambda folder: (folder / path).write_bytes(content)


def _strange() -> list[Case]:
    """Each of the strange texts in each place of a command line."""
    results = []
    for name, text in STRANGE.items():
        results += [
            cli(f"strange/command/{name}", text, expected=(USAGE, DONE) if name == "empty" else USAGE),
            cli(f"strange/option/{name}", f"--{text}", expected=USAGE),
            cli(f"strange/export-target/{name}", "export", text, *OUT, expected=(USAGE, FAILED)),
            cli(f"strange/export-opset/{name}", "export", T, *OUT, "--opset", text),
            cli(f"strange/export-target-runtime/{name}", "export", T, *OUT, "--target", text),
            cli(f"strange/inspect/{name}", "inspect", text),
            cli(f"strange/verify/{name}", "verify", text, T),
            cli(f"strange/run/{name}", "run", text, expected=(USAGE, FAILED)),
            cli(f"strange/why/{name}", "why", text, expected=(USAGE, FAILED)),
            cli(f"strange/plugins-show/{name}", "plugins", "show", text),
            cli(f"strange/plugins-new/{name}", "plugins", "new", text),
        ]
    return results


def _files_of_code() -> list[Case]:
    """TARGETs that exist, and give no model."""
    results = [
        cli(
            "target/syntax-error",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            words="SyntaxError",
            files=_text("b.py", "def ("),
        ),
        cli("target/not-utf8", "export", "b.py:make", *OUT, expected=FAILED, files=_bytes("b.py", b"x = '\xff\xfe'")),
        cli("target/null-bytes", "export", "b.py:make", *OUT, expected=FAILED, files=_bytes("b.py", b"x = 1\0")),
        cli(
            "target/exits",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            words="SystemExit",
            files=_text("b.py", "raise SystemExit(0)"),
        ),
        cli(
            "target/raises-text",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            files=_text("b.py", "raise Exception('\\x1b[2J[bold]')"),
        ),
        cli(
            "target/recursion",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            words="RecursionError",
            files=_text("b.py", "def make():\n    return make()"),
        ),
        cli(
            "target/returns-none",
            "export",
            "b.py:make",
            *OUT,
            words="NoneType",
            files=_text("b.py", "def make(): return None"),
        ),
        cli("target/returns-string", "export", "b.py:make", *OUT, files=_text("b.py", "def make(): return 'model'")),
        cli(
            "target/returns-four",
            "export",
            "b.py:make",
            *OUT,
            files=_text("b.py", "def make(): return print, (), {}, 4"),
        ),
        cli(
            "target/args-number",
            "export",
            "b.py:make",
            *OUT,
            files=_text("b.py", "import torch\ndef make(): return torch.nn.ReLU(), 3"),
        ),
        cli(
            "target/kwargs-list",
            "export",
            "b.py:make",
            *OUT,
            files=_text("b.py", "import torch\ndef make(): return torch.nn.ReLU(), (torch.ones(2),), [1]"),
        ),
        cli(
            "target/needs-argument",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            words="TypeError",
            files=_text("b.py", "def make(n): return n"),
        ),
        cli("target/is-number", "export", "b.py:make", *OUT, words="int", files=_text("b.py", "make = 7")),
        cli("target/attribute-of-none", "export", "b.py:a.b.c", *OUT, files=_text("b.py", "a = None")),
        cli("target/attribute-of-slots", "export", "b.py:a.b", *OUT, files=_text("b.py", "a = 3")),
        cli(
            "target/property-raises",
            "export",
            "b.py:a.b",
            *OUT,
            expected=(USAGE, FAILED),
            files=_text("b.py", "class A:\n    @property\n    def b(self): raise RuntimeError('no')\na = A()"),
        ),
        cli("target/is-folder", "export", "b.py:make", *OUT, files=lambda f: (f / "b.py").mkdir()),
        cli("target/fifo", "export", "b.py:make", *OUT, files=lambda f: os.mkfifo(f / "b.py")),
        cli("target/link-loop", "export", "b.py:make", *OUT, files=lambda f: os.symlink("b.py", f / "b.py")),
        cli("target/unreadable-device", "export", "/dev/zero:make", *OUT),
        cli(
            "target/raising-name",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            words="KeyError",
            files=_text("b.py", "{}['x']"),
        ),
        cli(
            "target/no-forward",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            files=_text("b.py", "import torch\ndef make(): return torch.nn.Module(), (torch.ones(2),)"),
        ),
        cli(
            "target/forward-raises",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            words="secret-words",
            files=_text(
                "b.py",
                "import torch\nclass M(torch.nn.Module):\n    def forward(self, x): raise ValueError('secret-words')\ndef make(): return M(), (torch.ones(2),)",
            ),
        ),
        cli(
            "target/shapes-do-not-fit",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            files=_text("b.py", "import torch\ndef make(): return torch.nn.Linear(4, 2), (torch.ones(3, 5),)"),
        ),
        cli(
            "target/dtypes-do-not-fit",
            "export",
            "b.py:make",
            *OUT,
            expected=FAILED,
            files=_text(
                "b.py", "import torch\ndef make(): return torch.nn.Linear(4, 2), (torch.ones(3, 4, dtype=torch.int64),)"
            ),
        ),
        cli("target/no-inputs", "export", "m.py:bare", *OUT, expected=(USAGE, FAILED)),
        cli(
            "target/lambda-of-nothing",
            "export",
            "b.py:make",
            *OUT,
            expected=(USAGE, FAILED),
            files=_text("b.py", "def make(): return (lambda x: x), ()"),
        ),
        cli("target/missing-module", "export", "no_such_module:make", *OUT, words="no_such_module"),
        cli("target/missing-name", "export", "m.py:mak", *OUT, words=("mak", "make")),
        cli("target/relative-module", "export", "..x:make", *OUT),
        cli("target/stdlib", "export", "os:getcwd", *OUT, words="str"),
        cli("target/stdlib-dangerous-name", "export", "os.path:no", *OUT),
        cli("target/colon-alone", "export", ":", *OUT),
        cli("target/py-alone", "export", ".py:make", *OUT),
        cli("target/timm-unknown", "export", "timm:no_such_model", *OUT, expected=(USAGE, FAILED)),
        cli("target/timm-empty", "export", "timm:", *OUT, expected=(USAGE, FAILED)),
        cli("target/timm-hub", "export", "timm:hf-hub:../../x", *OUT, expected=(USAGE, FAILED)),
        cli("target/timm-escape", "export", "timm:\x1b[2J", *OUT, expected=(USAGE, FAILED)),
        cli("target/pretrained-own", "export", T, *OUT, "--pretrained", words="--pretrained"),
        cli("target/empty-scheme", "export", "nothing-knows:x", *OUT),
    ]
    for command in ("bisect", "diagnose"):
        results += [
            cli(f"target/{command}-missing", command, "no.py:make"),
            cli(f"target/{command}-syntax", command, "b.py:make", expected=FAILED, files=_text("b.py", "def (")),
            cli(f"target/{command}-none", command, "b.py:make", files=_text("b.py", "def make(): return None")),
            cli(f"target/{command}-escape", command, "\x1b[31m:make"),
            cli(f"target/{command}-input", command, T, "--input", "x=float99[1]"),
            cli(f"target/{command}-opset", command, T, "--opset", "9999"),
            cli(f"target/{command}-dynamic", command, T, "--dynamic", "x"),
            cli(f"target/{command}-runtime", command, T, "--target", "nowhere"),
        ]
    return results


def _values() -> list[Case]:
    """Options with invalid values."""
    inputs = {
        "no-shape": "x=float32",
        "unknown-dtype": "x=floot[2]",
        "dtype-of-torch": "x=nn[2]",
        "negative": "x=float32[-2,3]",
        "words": "x=float32[a,b]",
        "open": "x=float32[2",
        "range-of-words": "x=int64[2]{a..b}",
        "range-turned": "x=int64[2]{9..0}",
        "range-huge": "x=int64[2]{0..99999999999999999999999}",
        "range-open": "x=int64[2]{0..}",
        "size-beyond": "x=float32[99999999999999999999]",
        "size-of-memory": "x=float32[1000000,1000000,1000]",
        "sizes-overflow": "x=float32[4294967296,4294967296,4294967296]",
        "number-of-digits": "x=" + "9" * 5000,
        "float-beyond": "x=1e99999",
        "name-with-dot": "a.b=float32[2]",
        "quantised": "x=qint8[2]",
        "bits": "x=bits8[2]",
        "long": "x=float32[" + "1," * 5000 + "1]",
        "ninety-nine-dims": "x=float32[" + "2," * 99 + "2]",
        "nothing": "",
        "equals": "=",
        "dunder": "x=__class__[2]",
    }
    dynamic = {
        "no-axes": "x",
        "empty": "",
        "numbers": "x=3,_",
        "words-with-space": "x=a b,_",
        "path": "x=../../etc,_",
        "many": "x=" + ",".join(f"a{i}" for i in range(3000)),
        "unknown-input": "zzz=batch,_",
        "too-many": "x=a,b,c,d",
        "markup": "x=[bold],_",
        "escape": "x=\x1b[1m,_",
        "code": "x=__import__('os'),_",
    }
    opsets = {
        "zero": "0",
        "twelve": "12",
        "newest-and-more": "99",
        "negative": "-1",
        "huge": "9" * 400,
        "float": "21.0",
        "twice": "21,=20",
        "domain-without-name": "21,com.microsoft",
        "domain-unknown": "21,com.nobody=1",
        "domain-version": "21,com.microsoft=x",
        "commas": ",,,",
        "roman": "xxi",
        "superscript": "²¹",
        "arabic": "٢١",
    }
    results = [cli(f"input/{n}", "export", T, *OUT, "--input", v, expected=(USAGE, FAILED)) for n, v in inputs.items()]
    results += [
        cli(f"dynamic/{n}", "export", T, *OUT, "--dynamic", v, expected=(USAGE, FAILED)) for n, v in dynamic.items()
    ]
    results += [cli(f"opset/{n}", "export", T, *OUT, "--opset", v) for n, v in opsets.items()]
    results += [
        cli(f"opset/why-{n}", "why", "aten::add.Tensor", "--opset", v)
        for n, v in opsets.items()
        if n != "domain-unknown"
    ]
    results += [
        cli("dynamic/twice", "export", T, *OUT, "--dynamic", "x=a,_", "--dynamic", "x=b,_", words="twice"),
        cli("dynamic/one-name-two-sizes", "export", T, *OUT, "--dynamic", "x=a,a", expected=(USAGE, FAILED)),
        cli("dynamic/fixed-by-the-model", "export", T, *OUT, "--dynamic", "x=_,features", expected=(USAGE, FAILED)),
        cli("input/unknown-name", "export", T, *OUT, "--input", "zzz=float32[3,4]", expected=(USAGE, FAILED)),
        cli("input/too-many", "export", T, *OUT, *["--input", "float32[3,4]"] * 5, expected=(USAGE, FAILED)),
        cli(
            "input/wrong-rank",
            "export",
            T,
            *OUT,
            "--input",
            "x=float32[4]",
            "--dynamic",
            "x=_,_",
            expected=(USAGE, FAILED),
        ),
        cli("input/wrong-features", "export", T, *OUT, "--input", "x=float32[3,5]", expected=FAILED),
        cli("input/wrong-dtype", "export", T, *OUT, "--input", "x=int64[3,4]", expected=FAILED),
        cli("input/text", "export", T, *OUT, "--input", "x=true", expected=(USAGE, FAILED)),
    ]
    return results


def _options() -> list[Case]:
    """Options that contradict each other, or are of another command."""
    lines = {
        "no-output": ("export", T),
        "no-target": ("export", *OUT),
        "two-targets": ("export", T, T, *OUT),
        "unknown-option": ("export", T, *OUT, "--fast"),
        "typing-error": ("export", T, *OUT, "--veriffy"),
        "output-without-value": ("export", T, "-o"),
        "names-empty": ("export", T, *OUT, "--input-names", ","),
        "names-twice": ("export", T, *OUT, "--input-names", "a,a"),
        "names-too-many": ("export", T, *OUT, "--input-names", "a,b,c"),
        "names-common": ("export", T, *OUT, "--input-names", "a", "--output-names", "a"),
        "output-names-too-many": ("export", T, *OUT, "--output-names", "a,b,c"),
        "capture": ("export", T, *OUT, "--capture", "half"),
        "mutations": ("export", T, *OUT, "--mutations", "all"),
        "decompositions": ("export", T, *OUT, "--decompositions", "all"),
        "metadata": ("export", T, *OUT, "--metadata", "everything"),
        "metadata-markup": ("export", T, *OUT, "--metadata", "[red]"),
        "shard-unit": ("export", T, *OUT, "--shard", "2 parsecs"),
        "shard-zero": ("export", T, *OUT, "--shard", "0"),
        "shard-negative": ("export", T, *OUT, "--shard", "-5"),
        "shard-huge": ("export", T, *OUT, "--shard", "9" * 400 + "GB"),
        "shard-digits": ("export", T, *OUT, "--shard", "9" * 5000),
        "shard-single": ("export", T, *OUT, "--shard", "2GB", "--single-file"),
        "external-kind": ("export", T, *OUT, "--external", "zip"),
        "external-without-weights": ("export", T, *OUT, "--external", "safetensors"),
        "strict-weights": ("export", T, *OUT, "--strict-weights"),
        "weights-verify": ("export", T, *OUT, "--weights", "m.py", "--verify"),
        "weights-pieces": ("export", T, "-o", "d", "--weights", "m.py", "--pieces", "linear"),
        "weights-missing": ("export", T, *OUT, "--weights", "no.safetensors"),
        "weights-kind": ("export", T, *OUT, "--weights", "m.py"),
        "weights-folder": ("export", T, *OUT, "--weights", "."),
        "weights-device": ("export", T, *OUT, "--weights", "/dev/null"),
        "pieces-unknown": ("export", T, "-o", "d", "--pieces", "nothing"),
        "pieces-empty": ("export", T, "-o", "d", "--pieces", ""),
        "pieces-path": ("export", T, "-o", "d", "--pieces", "../linear"),
        "pieces-twice": ("export", T, "-o", "d", "--pieces", "linear,linear"),
        "pieces-into-file": ("export", T, "-o", "m.py", "--pieces", "linear"),
        "triton-alone": ("export", T, *OUT, "--triton", "m"),
        "triton-name": ("export", T, "-o", "d", "--pieces", "linear", "--triton", "../m"),
        "pieces-names": ("export", T, "-o", "d", "--pieces", "linear", "--input-names", "a"),
        "function-classes-empty": ("export", T, *OUT, "--function-classes", ","),
        "function-classes-unknown": ("export", T, *OUT, "--function-classes", "Nothing"),
        "function-domain": ("export", T, *OUT, "--function-domain", ""),
        "function-domain-onnx": ("export", T, *OUT, "--function-domain", "ai.onnx"),
        "profile-folder": ("export", T, *OUT, "--profile=."),
        "profile-missing-folder": ("export", T, *OUT, "--profile=no/x.json"),
        "profile-empty": ("export", T, *OUT, "--profile="),
        "prefer": ("export", T, *OUT, "--prefer", "nothing"),
        "no-plugin-unknown": ("export", T, *OUT, "--no-plugin", "nobody"),
        "only-plugin-unknown": ("export", T, *OUT, "--only-plugin", "nobody"),
        "require-plugin-malformed": ("export", T, *OUT, "--require-plugin", ">>>"),
        "verify-no-model": ("verify",),
        "verify-missing": ("verify", "no.onnx", T),
        "verify-folder": ("verify", ".", T),
        "verify-device": ("verify", "/dev/zero", T),
        "verify-seed": ("verify", "m.py", T, "--seed", "x"),
        "inspect-missing": ("inspect", "no.onnx"),
        "inspect-folder": ("inspect", "."),
        "inspect-device": ("inspect", "/dev/zero"),
        "inspect-url": ("inspect", "https://localhost:1/model.onnx"),
        "why-dtype": ("why", "aten::add.Tensor", "--dtype", "floot"),
        "why-runtime": ("why", "aten::add.Tensor", "--target", "nowhere"),
        "ops-plugin": ("ops", "--plugin", "nobody"),
        "ops-runtime": ("ops", "--target", "nowhere"),
        "ops-opset": ("ops", "--opset", "x"),
        "ops-missing-target": ("ops", "--missing", "no.py:make"),
        "plugins-nothing": ("plugins", "shoow"),
        "plugins-show-unknown": ("plugins", "show", "nobody"),
        "plugins-timeout": ("plugins", "list", "--timeout", "-1"),
        "plugins-timeout-word": ("plugins", "list", "--timeout", "soon"),
        "plugins-timeout-nan": ("plugins", "list", "--timeout", "nan"),
        "plugins-check-opset": ("plugins", "check", "--opset", "x"),
        "plugins-check-unknown": ("plugins", "check", "nobody"),
        "new-path": ("plugins", "new", "../onnxplug-acme"),
        "new-absolute": ("plugins", "new", "/tmp/onnxplug-acme"),
        "new-keyword": ("plugins", "new", "class"),
        "new-itself": ("plugins", "new", "onnxplug"),
        "new-op": ("plugins", "new", "onnxplug-acme", "--op", "x"),
        "new-op-template": ("plugins", "new", "onnxplug-acme", "--op", "{{7*7}}::x"),
        "new-op-aten": ("plugins", "new", "onnxplug-acme", "--op", "aten::x"),
        "new-op-newline": ("plugins", "new", "onnxplug-acme", "--op", "acme::x\n"),
        "new-name-newline": ("plugins", "new", "onnxplug-acme\n"),
        "new-template": ("plugins", "new", "{{7*7}}"),
        "run-missing": ("run", "no.py"),
        "run-nothing": ("run",),
        "run-option": ("run", "--nowhere", "m.py"),
    }
    failed = {"pieces-into-file", "plugins-check-unknown", "ops-runtime", "why-dtype", "function-classes-unknown"}
    results = [
        cli(f"options/{name}", *line, expected=(USAGE, FAILED) if name in failed else USAGE)
        for name, line in lines.items()
    ]
    large = "import torch\ndef make(): return torch.nn.Linear(64, 64), (torch.ones(3, 64),)"
    return [
        *results,
        cli("options/shard-small", "export", "b.py:make", *OUT, "--shard", "100", files=_text("b.py", large)),
        cli("options/folder-without-main", "run", "d", files=lambda f: (f / "d").mkdir()),
    ]


def _destinations() -> list[Case]:
    """Invalid destinations of -o: nothing is written there, nor beside them."""

    def link(folder: Path) -> None:
        os.symlink("o.onnx", folder / "o.onnx")

    def protected(folder: Path) -> None:
        (folder / "d").mkdir(mode=0o500)

    places = {
        "folder": ("d", lambda f: (f / "d").mkdir()),
        "folder-slash": ("d/", lambda f: (f / "d").mkdir()),
        "missing-folder": ("no/o.onnx", None),
        "below-file": ("f/o.onnx", _text("f", "x")),
        "device": ("/dev/null", None),
        "full-device": ("/dev/full", None),
        "fifo": ("p", lambda f: os.mkfifo(f / "p")),
        "proc": ("/proc/self/mem", None),
        "link-loop": ("o.onnx", link),
        "link-to-folder": ("o.onnx", lambda f: os.symlink(".", f / "o.onnx")),
        "link-to-device": ("o.onnx", lambda f: os.symlink("/dev/null", f / "o.onnx")),
        "empty": ("", None),
        "dot": (".", None),
        "dots": ("..", None),
        "null": ("a\0b.onnx", None),
        "long-name": ("n" * 300 + ".onnx", None),
        "long-path": ("/".join(["n" * 200] * 30) + "/o.onnx", None),
        "escape-folder": ("\x1b[2J/o.onnx", None),
        "url": ("https://localhost:1/o.onnx", None),
    }
    if os.geteuid():
        places |= {"protected-folder": ("d/o.onnx", protected), "root-folder": ("/o.onnx", None)}
    return [
        cli(f"destination/{name}", "export", T, "-o", place, files=files, expected=(USAGE, FAILED))
        for name, (place, files) in places.items()
    ]


def _settings() -> list[Case]:
    """Invalid files pyproject.toml."""
    texts = {
        "not-toml": "[tool.onnxplug",
        "unknown-key": "[tool.onnxplug]\nfast = true",
        "wrong-type": "[tool.onnxplug]\nno-plugin = 3",
        "list-of-numbers": "[tool.onnxplug]\nonly-plugin = [1]",
        "strict": "[tool.onnxplug]\nstrict-plugins = 'yes'",
        "not-a-table": "tool.onnxplug = 3",
        "prefer": "[tool.onnxplug]\nprefer = ['x']",
        "tool-is-a-list": "tool = [1]",
        "escape": '[tool.onnxplug]\n"\\u001b[31m" = 1',
        "deep": "x = " + "[" * 5000,
    }
    results = [
        cli(f"settings/{name}", "why", "aten::add.Tensor", files=_text("pyproject.toml", text))
        for name, text in texts.items()
    ]
    results.append(cli("settings/not-utf8", "why", "aten::relu", files=_bytes("pyproject.toml", b"\xff\xfe[tool")))
    return results


CASES = [*_strange(), *_files_of_code(), *_values(), *_options(), *_destinations(), *_settings()]
