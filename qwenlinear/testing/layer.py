"""check_layer: run a Gated DeltaNet layer against the suite; every check compares with a float64 twin on TorchKernel."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import product

from qwenlinear.errors import UnsupportedCall
from qwenlinear.layers.gated_delta_net import GatedDeltaNet
from qwenlinear.testing.cases import Case, checked_cases
from qwenlinear.testing.checks import Errors, WrongValues
from qwenlinear.testing.kernel import versions
from qwenlinear.testing.layer_checks import LAYER_CHECKS
from qwenlinear.testing.report import CaseResult, ConformanceError, ConformanceReport
from qwenlinear.testing.running import Fault, same_bits


def check_layer(
    layer: GatedDeltaNet, *, first_failure: bool = True, cases: Iterable[Case] | None = None
) -> ConformanceReport:
    """Prove a layer, where it is and as it is: packing, caches, padding, modes, casts, saving, construction on meta.

    Args:
        layer: a layer with its weights, on any device, in any dtype; it is not changed.
        first_failure: stop at the first failure (default), or run everything and then raise.
        cases: run these instead, for example the one that an error message names.

    Returns:
        The report; ``report.passed`` is True.

    Raises:
        ValueError: no layer object, or cases that are none.
        ConformanceError: something failed, or every case was refused; the report is its ``.report``.

    Example:
        >>> from qwenlinear import GatedDeltaNetConfig, Qwen3_5GatedDeltaNet, TorchKernel
        >>> config = GatedDeltaNetConfig(hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2,
        ...                              linear_key_head_dim=8, linear_value_head_dim=8)
        >>> check_layer(Qwen3_5GatedDeltaNet(config, TorchKernel()), cases=[Case("one pass", T=5)]).passed
        True
    """
    if not isinstance(layer, GatedDeltaNet):
        raise ValueError(f"layer needs a GatedDeltaNet, got {layer!r:.80}")
    cases = checked_cases(cases)
    dtype = str(layer.out_proj.weight.dtype).removeprefix("torch.")
    results: list[CaseResult] = []
    for case in _generate(dtype) if cases is None else cases:
        results += _run_case(layer, case)
        if first_failure and results[-1].status == "failed":
            break
    subject = f"{type(layer).__name__}({layer.config!r}, {layer.kernel!r})"
    report = ConformanceReport(subject, str(layer.A_log.device), tuple(results), (), versions(), "check_layer")
    if not report.passed:
        raise ConformanceError(report)
    return report


def _generate(dtype: str) -> Iterator[Case]:
    base = Case("", dtype=dtype, T=70, B=2, grad="all")
    yield base.but(topic="one pass")
    yield base.but(topic="evaluation mode", check="evaluation")
    yield base.but(topic="no token", T=0)
    for lengths in ((30, 34), (1, 64, 2, 3), (0, 5, 0, 70, 0)):
        yield base.but(topic="packed equals separate", check="packed", lengths=lengths)
    yield base.but(topic="packed documents kept apart", check="apart", lengths=(5, 3, 7), grad="")
    for cuts in product((False, True), repeat=4):  # every split of five tokens
        yield base.but(topic="split equals one pass", check="split", T=5, pieces=_pieces(cuts), grad="")
    for pieces in ((64, 6), (66, 1, 1, 2), (1, 69)):
        yield base.but(topic="split equals one pass", check="split", T=70, pieces=pieces)
    yield base.but(topic="packed, then a batch", check="continued", lengths=(3, 1, 66), T=2)
    for side in ("left", "right"):
        yield base.but(topic=f"padding at the {side}", check="padded", lengths=(9, 4, 0), T=9, expects=side)
        yield base.but(
            topic=f"padding at the {side}, cached", check="prefilled", lengths=(9, 4), T=9, expects=side, grad=""
        )
    yield base.but(topic="mask of ones", check="unmasked", T=6)
    yield base.but(topic="mask and boundaries", check="contradiction", B=1, T=6, grad="")
    for cast_to in ("bfloat16", "float16", "float32", "float64"):
        yield base.but(topic=f"cast to {cast_to}", check="casts", T=6, expects=cast_to, grad="")
    yield base.but(topic="saved and loaded", check="saved", T=6)
    yield base.but(topic="built on meta", check="meta", T=6)


def _pieces(cuts: tuple[bool, ...]) -> tuple[int, ...]:
    pieces = [1]
    for cut in cuts:
        if cut:
            pieces.append(1)
        else:
            pieces[-1] += 1
    return tuple(pieces)


def _run_case(layer: GatedDeltaNet, case: Case) -> list[CaseResult]:
    start = time.perf_counter()

    def result(status: str, text: str = "", errors: Errors | None = None) -> CaseResult:
        return CaseResult(case, status, text, errors or {}, time.perf_counter() - start)

    before = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    training = layer.training
    try:
        errors = LAYER_CHECKS[case.check](layer, case)
        if changed := same_bits(before, layer.state_dict()):
            raise Fault(f"the call changed {changed[0]}")
        return [result("passed", errors=errors)]
    except WrongValues as error:
        return [result("failed", str(error), error.errors)]
    except Fault as error:
        return [result("failed", str(error))]
    except UnsupportedCall as error:
        refused = result("refused", "; ".join(map(str, error.refusals)))
        return [refused, *_run_case(layer, case.but(grad=""))] if case.grad else [refused]
    except Exception as error:
        return [result("failed", f"{type(error).__name__}: {error}")]
    finally:
        layer.train(training)
