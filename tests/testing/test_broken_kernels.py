"""Every kernel that is wrong on purpose fails, by a case that names its fault."""

from __future__ import annotations

import pytest

from qwenlinear.testing import Case, ConformanceError, check_kernel
from tests.testing import broken_conduct  # noqa: F401  # registers its kernels, too
from tests.testing.broken_kernels import BROKEN


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda kernel: kernel.__name__)
def test_fails_by_a_case_that_names_the_fault(kernel) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_kernel(kernel(), packings=20)
    message, report = str(caught.value), caught.value.report
    assert report.passed is False
    assert all(word in message for word in BROKEN[kernel]), message
    first = message.splitlines()[0]
    (failure,) = report.failures
    again = {"check_kernel": check_kernel, "Case": Case, kernel.__name__: kernel}
    with pytest.raises(ConformanceError) as repeated:
        eval(first, again)  # the message starts with a line that reproduces the case
    assert repeated.value.report.failures[0].text.split(":")[0] == failure.text.split(":")[0]
