"""qwenlinear run: a tiny model and a folder, offline; errors before anything is loaded."""

from __future__ import annotations

import re

import pytest

from qwenlinear import cli

pytest.importorskip("transformers", minversion="5.6")
from tests.hf.models import make


def test_tiny(capsys) -> None:
    assert cli.main(["run", "--model", "tiny", "--max-new-tokens", "5", "--qwen-gdn-backend", "torch"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("tiny: a model of four layers with random weights")
    assert "3 of 3 Gated DeltaNet layers compute with an injected kernel" in told
    assert "TorchKernel()" in told
    assert re.search(r"^prefill: 20 tokens, [\d.]+ tokens/s", told, re.MULTILINE)
    assert re.search(r"^decode: 4 tokens, [\d.]+ tokens/s", told, re.MULTILINE)


def test_a_folder_with_its_tokenizer(capsys, tmp_path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    model = make("next")
    model.save_pretrained(tmp_path)
    words = {f"w{n}": n for n in range(97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert cli.main(["run", "--model", str(tmp_path), "--prompt", "w5 w6 w7", "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr().out
    import torch

    want = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=4)[0, 3:]
    assert " ".join(f"w{n}" for n in want.tolist()) in told
    assert "prefill: 3 tokens" in told
    assert "kernel of the chunk form: TorchKernel()\nkernel of the step form: TorchKernel()\n" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "some/where"], "--model needs tiny or a local folder"),
        (["--model", "tiny", "--qwen-gdn-backend", "fla", "--device", "cpu"], "FLAKernel"),
        (["--model", "tiny", "--dtype", "int3"], "--dtype needs auto"),
        (["--model", "tiny", "--prompt", ""], "--prompt needs at least one token"),
        (["--model", "tiny", "--max-new-tokens", "0"], "--max-new-tokens needs a number"),
    ],
)
def test_errors(words, told, capsys) -> None:
    assert cli.main(["run", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_kernel_nobody_knows_is_a_usage_error(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "--model", "tiny", "--qwen-gdn-backend", "fast"])
    assert "the kernel's name needs to be" in capsys.readouterr().err
