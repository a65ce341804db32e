"""From a fitted estimator of scikit-learn to an ONNX model.

Rule: what comes out gives what the estimator gives, or is refused. To run, any estimator that
skl2onnx converts; to train, those whose prediction is a chain of matrix products: linear models and
perceptrons, behind scalers.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
from bbnode.components.errors import BackendError
from bbnode.ir.errors import AuthorError, DeploymentError
from bbnode.ir.installation import install
from bbnode.ir.keys import (
    FRAMEWORK_IR_VERSION,
    ONNX_ML_DOMAIN,
    ONNX_OPSET_VERSION,
    PRODUCER_NAME,
)

Estimator: TypeAlias = Any
Numbers: TypeAlias = npt.NDArray[np.float32]

TOLERANCE: Final = 1e-4  # float32 against scikit-learn's float64
_ML_OPSET: Final = 3  # of ai.onnx.ml
_ACTIVATIONS: Final = {"relu": "Relu", "tanh": "Tanh", "logistic": "Sigmoid", "identity": ""}
_TRAINABLE: Final = (
    "LogisticRegression, LinearRegression, Ridge, Lasso, ElasticNet, SGDRegressor, MLPClassifier, "
    "MLPRegressor, or a pipeline of StandardScaler or MinMaxScaler and one of them"
)
_LINEAR: Final = frozenset({"LinearRegression", "Ridge", "Lasso", "ElasticNet", "SGDRegressor"})


class SklearnMissing(DeploymentError):
    """scikit-learn or skl2onnx is not installed."""


class EstimatorNotExportable(AuthorError):
    """An estimator can't be exported to an ONNX model that gives what the estimator gives."""


def export(estimator: Estimator, example: Any, *, train: bool = False) -> ModelProto:
    """Export a fitted estimator, and check that the model gives what the estimator gives.

    Args:
        estimator: fitted; a pipeline is one too.
        example: a few rows of features, [N, F] numbers.
        train: make a model that can be trained: of float32 weights, from features "x" [batch, F] to
            "logits" [batch, classes], for "softmax_cross_entropy" with numbers of `classes_` as
            labels; or to "y" [batch, outputs], for "mse". Scalers are constants of it.

    Returns:
        A model at the opset that programs are recorded in, or the newest of skl2onnx. To run, it
        has what skl2onnx gives it: "label" and "probabilities" of a classifier, the predictions of
        others. Linear classifiers are ops of `ai.onnx.ml` then, which have no gradient.

    Raises:
        SklearnMissing: scikit-learn or skl2onnx is not installed.
        EstimatorNotExportable: it is not fitted, can't be converted or trained, or differs by more
            than 1e-4; says what to do.
    """
    _require("sklearn", "scikit-learn>=1.7.2")
    name = type(estimator).__name__
    rows = np.asarray(example, np.float32) if _is_numbers(example) else None
    if rows is None or rows.ndim != 2 or 0 in rows.shape:
        raise EstimatorNotExportable(f"{name}: the example is no table of numbers, [rows, columns]")
    _check_fitted(estimator)
    model = _to_train(estimator, rows.shape[1]) if train else _to_run(estimator, rows)
    try:
        made = OrtBackend(OrtBackendConfig()).prepare(model).run([rows])
    except BackendError as error:
        raise EstimatorNotExportable(f"{name}: the exported model does not run: {error}") from error
    fault = _fault(estimator, rows, [np.asarray(each) for each in made], train)
    if fault:
        raise EstimatorNotExportable(
            f"{name}: the exported model does not give what the estimator gives: {fault}"
        )
    return model


def _require(name: str, wanted: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SklearnMissing(f"{name} can't be imported ({error}); {install(wanted)}") from error


def _is_numbers(example: Any) -> bool:
    return np.asarray(example).dtype.kind in "fiub"


def _check_fitted(estimator: Estimator) -> None:
    checks = importlib.import_module("sklearn.utils.validation")
    try:
        checks.check_is_fitted(estimator)
    except (TypeError, importlib.import_module("sklearn.exceptions").NotFittedError) as error:
        raise EstimatorNotExportable(f"{type(estimator).__name__}: {error}") from error


def _to_run(estimator: Estimator, rows: Numbers) -> ModelProto:
    skl2onnx = _require("skl2onnx", "skl2onnx>=1.20")
    opset = min(ONNX_OPSET_VERSION, skl2onnx.__max_supported_opset__)
    # Without it, probabilities come out as a list of dictionaries.
    options = {id(estimator): {"zipmap": False}} if hasattr(estimator, "predict_proba") else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own use of onnx and scikit-learn
            model: ModelProto = skl2onnx.to_onnx(
                estimator,
                rows[:1],
                options=options,
                target_opset={"": opset, ONNX_ML_DOMAIN: _ML_OPSET},
            )
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EstimatorNotExportable(
            f"{type(estimator).__name__}: skl2onnx can't convert it: {lines[0]:.300}"
        ) from error
    versions: dict[str, int] = {}
    for entry in model.opset_import:  # some twice
        versions[entry.domain] = max(versions.get(entry.domain, 0), entry.version)
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*each) for each in versions.items())
    for port in (*model.graph.input, *model.graph.output):
        dims = port.type.tensor_type.shape.dim
        if dims and not dims[0].dim_value:
            dims[0].dim_param = "batch"
    return model


class _Chain:
    """A graph of one node behind the other, from the features "x"."""

    def __init__(self) -> None:
        self.value = "x"
        self.nodes: list[Any] = []
        self.weights: list[TensorProto] = []

    def constant(self, op: str, numbers: Any) -> None:
        """Append an op with a constant that is no initializer, so that nobody trains it."""
        name = f"constant{len(self.nodes)}"
        value = numpy_helper.from_array(np.asarray(numbers, np.float32), name)
        self.nodes.append(helper.make_node("Constant", [], [name], name=name, value=value))
        self.append(op, name)

    def product(self, matrix: Any, bias: Any) -> None:
        """Append x @ matrix + bias; matrix is [in, out]."""
        at = len(self.weights) // 2
        names = [f"layer{at}.weight", f"layer{at}.bias"]
        for name, numbers in zip(names, (matrix, bias), strict=True):
            array = np.ascontiguousarray(numbers, np.float32)
            self.weights.append(numpy_helper.from_array(array, name))
        self.append("Gemm", *names)

    def append(self, op: str, *inputs: str) -> None:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [self.value, *inputs], [name], name=name))
        self.value = name


def _to_train(estimator: Estimator, width: int) -> ModelProto:
    chain = _Chain()
    *scalers, last = [step for _, step in getattr(estimator, "steps", [("", estimator)])]
    for scaler in scalers:
        _scale(chain, scaler)
    kind = type(last).__name__
    is_class = kind in ("LogisticRegression", "MLPClassifier")
    if kind == "LogisticRegression" or kind in _LINEAR:
        layers = [(np.atleast_2d(last.coef_).T, np.atleast_1d(last.intercept_))]
        activation = ""
    elif kind in ("MLPClassifier", "MLPRegressor"):
        layers = [*zip(last.coefs_, last.intercepts_, strict=True)]
        activation = _ACTIVATIONS[last.activation]
        if last.out_activation_ not in ("identity", "logistic", "softmax"):
            raise _not_trainable(kind)
        if is_class and getattr(last, "_label_binarizer", None) is not None:
            kinds = last._label_binarizer.y_type_
            if kinds.startswith("multilabel"):
                raise _not_trainable(f"{kind} of several labels at once")
    else:
        raise _not_trainable(kind)
    if is_class and layers[-1][0].shape[1] == 1:
        # One number z, of the second class: the two classes have -z/2 and z/2, whose softmax is
        # its sigmoid.
        matrix, bias = layers[-1]
        layers[-1] = (np.hstack([-matrix, matrix]) / 2, np.hstack([-bias, bias]) / 2)
    for at, (matrix, bias) in enumerate(layers):
        outputs = matrix.shape[1]
        chain.product(matrix, np.broadcast_to(bias, (outputs,)))
        if activation and at < len(layers) - 1:
            chain.append(activation)
    name = "logits" if is_class else "y"
    chain.nodes[-1].output[0] = name
    return helper.make_model(
        helper.make_graph(
            chain.nodes,
            kind,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", outputs])],
            chain.weights,
        ),
        producer_name=PRODUCER_NAME,
        ir_version=FRAMEWORK_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET_VERSION)],
    )


def _scale(chain: _Chain, scaler: Estimator) -> None:
    kind = type(scaler).__name__
    if kind == "StandardScaler":
        if scaler.mean_ is not None and scaler.with_mean:
            chain.constant("Sub", scaler.mean_)
        if scaler.scale_ is not None:
            chain.constant("Div", scaler.scale_)
    elif kind == "MinMaxScaler" and not scaler.clip:
        chain.constant("Mul", scaler.scale_)
        chain.constant("Add", scaler.min_)
    else:
        raise _not_trainable(f"{kind} in a pipeline")


def _not_trainable(what: str) -> EstimatorNotExportable:
    return EstimatorNotExportable(
        f"{what} has no graph that can be trained; train {_TRAINABLE}, or export it to run only "
        "(train=False)"
    )


def _fault(estimator: Estimator, rows: Numbers, made: list[Any], train: bool) -> str:
    """Say how what the model made differs from what the estimator predicts; "" if it does not."""
    wanted: list[Any]
    if hasattr(estimator, "predict_proba"):
        chances = estimator.predict_proba(rows)
        if train:
            shifted = np.exp(made[0] - made[0].max(axis=1, keepdims=True))
            made, wanted = [shifted / shifted.sum(axis=1, keepdims=True)], [chances]
        else:
            made, wanted = made[1:2], [chances]
    elif hasattr(estimator, "predict"):
        wanted = [estimator.predict(rows)]
    else:
        wanted = [estimator.transform(rows)]
    for have, want in zip(made, wanted, strict=False):
        target = np.asarray(want)
        if have.dtype.kind not in "fiub" or target.dtype.kind not in "fiub":
            if list(map(str, np.ravel(have))) != list(map(str, np.ravel(target))):
                return "other labels"
            continue
        if have.size != target.size:
            return f"shape {list(have.shape)} instead of {list(target.shape)}"
        flat = have.reshape(-1).astype(np.float64), target.reshape(-1).astype(np.float64)
        if not np.allclose(*flat, rtol=TOLERANCE, atol=TOLERANCE):
            return f"by up to {float(np.abs(flat[0] - flat[1]).max()):.3g}"
    return ""
