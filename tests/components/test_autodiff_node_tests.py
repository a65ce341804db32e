"""ONNX's own node tests as cases: of each op that has a rule, its gradient against differences."""

from __future__ import annotations

import pytest

from bbnode.components.autodiff import GradientRuleError
from tests.components.gradient_checks import check_node_case, node_cases

# What a rule says that it cannot do; each names the node.
REFUSED = (
    "ceil_mode", "spatial sizes", "no axis of channels", "its draw", "running statistics",
    "is no constant", "(output_shape)",
)  # fmt: skip
# With graphs of their own, which this harness does not split; their tests are in other files.
OTHERS = frozenset({"GRU", "If", "LSTM", "Loop", "RNN", "Scan"})
# What float16 does not tell apart: large values, and elements that become equal.
BEYOND_HALVES = frozenset({
    "test_logsoftmax_large_number-0", "test_maxpool_2d_pads-0",
    "test_reduce_prod_default_axes_keepdims_random-0", "test_softmax_large_number-0",
})  # fmt: skip
# The reference evaluator samples at other positions than ONNX Runtime.
ELSEWHERE = frozenset({
    "test_resize_downsample_scales_cubic_align_corners-0",
    "test_resize_downsample_scales_linear_align_corners-0",
})  # fmt: skip


@pytest.mark.slow
def test_gradients_of_onnx_node_tests() -> None:
    """Every case of an op with a rule, with all sizes given and with symbols for them."""
    failures, compared = [], set()
    for case in node_cases():
        if case.node.op_type in OTHERS or case.name in BEYOND_HALVES | ELSEWHERE:
            continue
        for symbolic in (False, True):
            try:
                if check_node_case(case, symbolic):
                    compared.add(case.node.op_type)
            except GradientRuleError as error:
                if not symbolic and not any(said in str(error) for said in REFUSED):
                    failures.append(f"{case.name}: {error}")
            except Exception as error:  # noqa: BLE001  # all failures are told at once
                failures.append(f"{case.name} (symbolic: {symbolic}): {str(error)[:300]}")
    assert not failures, "\n".join(failures)
    assert len(compared) > 90
