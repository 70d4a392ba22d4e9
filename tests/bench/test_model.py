"""bench model at tiny size: every side on the same weights, losses compared, a side that fails does not stop the others."""

from __future__ import annotations

import json

import pytest
import torch

from qwenlinear import cli
from qwenlinear.bench.model_profile import WITHOUT

pytest.importorskip("transformers", minversion="5.6")


def test_tiny(tmp_path, capsys) -> None:
    words = ["--tiny", "--device", "cpu", "--dtype", "float32", "--layers", "4", "--tokens", "48", "--documents", "4"]
    words += ["--prompt", "16", "--rows", "2", "--steps", "3", "--kernels", "torch", "flashqla", "--rounds", "3"]
    assert cli.main(["bench", "model", *words, "--part-seconds", "1", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "model.json").read_text())
    rows = {(row["part"], row["side"]): row for row in results["rows"]}
    assert len(rows) == 13  # training has one more, without the layers
    assert "profile" not in results  # by default only on a GPU
    assert rows["train", "injected TorchKernel"]["loss"] > 0
    assert rows["train", "injected TorchKernel"]["tokens_per_second"] > 0
    assert "UnsupportedCall" in rows["train", "injected FlashQLAKernel"]["error"]
    for part in ("prefill", "decode"):
        assert rows[part, "Transformers"]["tokens_per_second"] > 0
        assert rows[part, "injected TorchKernel"]["speedup"] > 0
    assert "| decode | injected TorchKernel |" in (tmp_path / "model.md").read_text()
    without = rows["train", WITHOUT]
    assert without["tokens_per_second"] > 0
    assert "layers_ms" not in without
    assert {"step_ms", "layers_ms"} <= rows["train", "injected TorchKernel"].keys()
    trained = sum(
        "tokens_per_second" in row for (part, side), row in rows.items() if part == "train" and side != WITHOUT
    )
    told = "Fewer than two sides trained" if trained < 2 else f"of the {trained} sides that trained agree."
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "kernels", "dtype", "tokens"),
    [("cpu", ["torch"], "float32", 1024), ("cuda", ["fla", "flashqla"], "bfloat16", 32768)],
)
def test_defaults_are_the_devices(monkeypatch, tmp_path, device, kernels, dtype, tokens) -> None:
    import argparse

    from qwenlinear.bench import model

    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    args = parser.parse_args(["--parts", "prefill", "--out", str(tmp_path)])
    args.device = device  # the parser wants one that is here
    monkeypatch.setattr(model, "Bench", lambda given: (_ for _ in ()).throw(InterruptedError))  # nothing is built
    with pytest.raises(InterruptedError):
        model.run(args)
    assert args.parts == ["prefill"]
    assert (args.kernels, args.dtype, args.tokens, args.prompt) == (kernels, dtype, tokens, tokens)


def test_agreement_is_said_of_those_who_trained() -> None:
    from qwenlinear.bench import machine
    from qwenlinear.bench.model import markdown

    row = {"part": "train", "tokens_per_second": 1.0, "speedup": 1.0, "loss": 1.0, "gradient_norm": 1.0}
    failed = "Traceback\n  File\nqwenlinear.errors.UnsupportedCall: X cannot run chunk:\n  - [a] one\n  - [b] two\n"
    results = {"machine": machine.describe(torch.device("cpu")), "command": "qwenlinear bench model"}
    for sides, agree, told in (
        (1, True, "Fewer than two"),
        (2, True, "2 sides that trained agree."),
        (2, False, "DO NOT"),
    ):
        rows = [row | {"side": str(n)} for n in range(sides)] + [{"part": "train", "side": "X", "error": failed}]
        page = markdown({**results, "rows": rows, "losses_agree": agree})
        assert told in page
        assert "| train | X | [a] one; [b] two |" in page


def test_the_batch_is_the_documents() -> None:
    """The benchmark's own attention and the packed layers give the loss of separate documents."""
    import argparse

    from qwenlinear.bench.model import Bench, add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--tiny --device cpu --dtype float32 --layers 4 --tokens 12 --documents 3 --kernels torch"
    bench = Bench(parser.parse_args(words.split()))
    bench.attention.length = 4
    work, _, _ = bench._train()
    model, untouched = bench.sides["injected TorchKernel"].model, bench.sides["Transformers"].model
    assert {id(p) for p in model.parameters()} == {id(p) for p in untouched.parameters()}
    facts = work("injected TorchKernel", model)
    bench.attention.length = None
    untouched.eval()
    ids = bench._ids(1, 12)
    with torch.no_grad():
        logits = torch.cat([untouched(part, use_cache=False).logits for part in ids.split(4, 1)], 1)
    want = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert facts["loss"] == pytest.approx(want.item(), rel=1e-5)
