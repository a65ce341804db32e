"""Gradient boosted trees as one tensor: grown on a client's examples, run as ONNX.

Rule: what travels and what is kept is a table of numbers, float32 [trees, nodes, 5], checked whole
before it is used; no library reads what a peer sent. LightGBM grows trees (Ke et al., 2017,
NeurIPS) where there are examples; elsewhere it is not needed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from bbnode.components.contracts import DataSource, Model, OpContext, OutputKind, offload
from bbnode.components.data.schema import DataSchema
from bbnode.components.errors import (
    BackendUnavailable,
    DataDoesNotFit,
    NotExportable,
    ParameterMismatch,
    TrainingFailed,
    UnsupportedByModel,
)
from bbnode.components.libraries import LIGHTGBM, OptionalLibrary
from bbnode.components.models.labels import negative_remedy
from bbnode.components.registry import register_component
from bbnode.ir import codec, types
from bbnode.ir.installation import install
from bbnode.ir.keys import FRAMEWORK_IR_VERSION, ONNX_ML_DOMAIN, ONNX_OPSET_VERSION
from bbnode.ir.types import TypeNode
from bbnode.ir.values import Metadata, Value

Table: TypeAlias = npt.NDArray[np.float32]
Array: TypeAlias = npt.NDArray[Any]

# Columns of a node: the feature that it compares, its threshold, or the value of a leaf; the nodes
# behind it, by number; 1 where a missing value goes to the left. x <= threshold goes there too.
FEATURE, NUMBER, LEFT, RIGHT, MISSING_LEFT = range(5)
COLUMNS: Final = 5
LEAF: Final = -1  # in the place of a feature
UNUSED: Final = -2  # likewise, of what a tree needs no node for; the other columns are 0

_ML_OPSET: Final = 3
_LARGEST: Final = float(np.finfo(np.float32).max)
_MAX_CLASSES: Final = 1024  # each has trees of its own
_MAX_LEAVES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class BoostedTreesConfig:
    """Settings of `BoostedTrees`.

    Attributes:
        features: numbers of an example.
        classes: of labels 0, 1, …: two or more; 0: labels are values, of a regression.
        leaves: of one tree, at most.
        max_depth: of one tree; 0 is no bound but `leaves`.
        min_leaf: examples in a leaf, at least.
        learning_rate: that each tree is scaled by.
        l2: regularisation of leaves.
        max_leaf: the largest absolute value of a leaf that is believed.
        max_trees: of the model; beyond, none is added.
        seed: of LightGBM.
    """

    features: int
    classes: int = 0
    leaves: int = 31
    max_depth: int = 0
    min_leaf: int = 20
    learning_rate: float = 0.1
    l2: float = 0.0
    max_leaf: float = 1e6
    max_trees: int = 10_000
    seed: int = 0


@register_component
class BoostedTrees(Model):
    """Boosted trees in the place of a model: `params` are its trees, `train` grows more.

    A vector of trees is float32 [T 5 (2 leaves - 1)], and empty before the first. Tree t is of the
    output t modulo the outputs, of which there are one for each class, and one for a regression or
    two classes. `forward` gives what trees add up to: [N, 1] of a regression, [N, classes] logits
    else. Labels of a regression are float32, those of classes int64.

    The first `train` of an empty model grows a constant for each output, by the mean of
    the labels, or how often each class is among them; later ones grow trees on gradient and
    curvature of the loss at the present model: squared error, or cross-entropy. That needs
    lightgbm.
    """

    TYPE_NAME: ClassVar[str] = "bbnode.BoostedTrees"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = (LIGHTGBM,)
    Config: ClassVar[type] = BoostedTreesConfig
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute", "data_source": "data"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {"data_source": ("train",)}
    storage: ClassVar[Mapping[str, TypeNode | tuple[TypeNode, ...]]] = {
        **Model.storage,
        "Forward.output": types.TENSOR_FLOAT,
        "Forward.input": types.TENSOR_FLOAT,
        "ComputeLoss.input": types.TENSOR_FLOAT,
    }
    config: BoostedTreesConfig

    def __init__(self, config: BoostedTreesConfig) -> None:
        super().__init__(config)
        c = config
        self.require(c.features >= 1, f"features is {c.features}; 1 or more")
        good = c.classes == 0 or 2 <= c.classes <= _MAX_CLASSES
        self.require(good, f"classes: 0, or 2 to {_MAX_CLASSES}")
        self.require(2 <= c.leaves <= _MAX_LEAVES, f"leaves: 2 to {_MAX_LEAVES}")
        self.require(
            min(c.max_depth, c.seed) >= 0 and min(c.min_leaf, c.max_trees) >= 1,
            "max_depth and seed are 0 or more, min_leaf and max_trees 1 or more",
        )
        for name in ("learning_rate", "max_leaf"):
            value = getattr(c, name)
            self.require(0 < value < math.inf, f"{name} is {value}; a number above 0")
        self.require(0 <= c.l2 < math.inf, f"l2 is {c.l2}; 0 or more")
        self._trees = np.zeros((0, nodes_of(c.leaves), COLUMNS), np.float32)

    @offload(reads_only=True)
    def bootstrap(self, ctx: OpContext) -> None:
        """Compare the data with the settings, where the program trains on them.

        Raises:
            DataUnavailable: the data source can't load them.
            DataDoesNotFit: they have other features, or labels that are no classes.
        """
        if not self.has_dependency("data_source"):
            return
        source: DataSource = self.dependency("data_source")
        schema = source.schema()
        why = "" if schema is None else self._misfit(schema)
        if why:
            source.forget()  # others may stand there the next time
            raise DataDoesNotFit(
                f"{source.TYPE_NAME} of slot {self.depends['data_source']!r} does not fit "
                f"{self.TYPE_NAME}: {why}"
            )

    def _misfit(self, schema: DataSchema) -> str:
        """Return why data of this schema can't be trained on; "" where they can."""
        c, labels = self.config, schema.labels
        column = f" in {schema.label_name!r}" if schema.label_name else ""
        if schema.features.shape != (c.features,):
            return f"the program takes {c.features} features, the data have {schema.features}"
        if labels.shape not in ((), (1,)):
            return f"labels{column} are {labels}, one number for each example is taken"
        span = schema.label_range or schema.value_range
        if c.classes and span is not None:
            if span[0] < 0:
                remedy = negative_remedy(int(span[0]), int(span[1])).partition(", or set")[0]
                return f"the data have the label {span[0]:g}{column}; {remedy}"
            if span[1] >= c.classes:
                return (
                    f"the program tells {c.classes} classes apart, 0 to {c.classes - 1}, and labels"
                    f"{column} are up to {span[1]:g}; number the classes from 0, or compile for "
                    "more"
                )
        if not c.classes and len(schema.classes) > 1:
            return (
                f"labels{column} are names, numbered from 0, which a regression would take for "
                f"quantities; compile with classes={len(schema.classes)}"
            )
        return ""

    @property
    def outputs(self) -> int:
        """The trees of one round of boosting."""
        return self.config.classes if self.config.classes > 2 else 1

    def params(self, ctx: OpContext) -> Value:
        """Return the trees as one vector, read-only."""
        flat = self._trees.reshape(-1)
        flat.flags.writeable = False
        return flat

    def load_parameters(self, ctx: OpContext, params: Value) -> None:
        """Replace the trees; ParameterMismatch for what are none."""
        self._trees = self._checked(params)

    def apply_delta(self, ctx: OpContext, delta: Value) -> None:
        """Add trees behind the others; ParameterMismatch for what are none, or too many."""
        self._trees = self._checked(np.concatenate([self._trees.reshape(-1), self._flat(delta)]))

    @offload(reads_only=True)
    def forward(self, ctx: OpContext, batch: Value) -> Value:
        """Return what the trees add up to: [N, 1] float32, or logits [N, classes]."""
        sums = self._sums(batch)
        if self.config.classes != 2:
            return sums
        return np.concatenate([np.zeros_like(sums), sums], axis=1)

    @offload(reads_only=True)
    def compute_loss(self, ctx: OpContext, batch: Value, target: Value) -> Value:
        """Return the mean squared error, or cross-entropy, float32 scalar."""
        labels = self._labels(target, len(batch))
        return np.array(self._loss(self._sums(batch), labels), np.float32)

    @offload
    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> Metadata:
        """Grow `epochs` trees for each output on all examples of the data source.

        The Metadata has `num_samples`, `steps` (the trees) and `loss`, before them.

        Raises:
            TrainingFailed: the examples do not fit the settings, or LightGBM refuses them.
            BackendUnavailable: lightgbm is not installed.
        """
        source = self.dependency("data_source")
        ((rows, target),) = source.epoch_batches(source.num_samples)
        labels = self._labels(target, len(rows))
        x, sums = self._rows(rows), self._sums(rows)
        loss = self._loss(sums, labels)
        if len(self._trees) == 0:
            grown = self._constants(labels)
        else:
            grown = self._grown(x, labels, sums, epochs)
        self._trees = self._checked(np.concatenate([self._trees, grown]).reshape(-1))
        return Metadata(num_samples=len(x), loss=loss, steps=len(grown))

    def example_batch(self, rows: int, *, draw: int = 0) -> tuple[Value, Value]:
        """Return made-up examples and labels."""
        rng = np.random.default_rng(draw)
        x = rng.normal(size=(rows, self.config.features)).astype(np.float32)
        if not self.config.classes:
            return x, rng.normal(size=rows).astype(np.float32)
        return x, np.arange(rows, dtype=np.int64) % self.config.classes

    def output_kind(self) -> OutputKind:
        """Return what the first output is: numbers of a regression, else probabilities."""
        return "probabilities" if self.config.classes else "value"

    def export(self) -> ModelProto:
        """Return ONNX of "x" [N, F]: a regression's "values" [N, 1], or "probabilities", "label".

        Probabilities are float32 [N, classes], labels int64 [N]; no other library is needed.
        """
        if len(self._trees) == 0:
            raise NotExportable(f"{self.TYPE_NAME}: there are no trees yet; make a round first")
        return ensemble_model(self._trees, self.config.features, self.config.classes)

    def serialize(self) -> bytes:
        """Return the trees."""
        return self.freeze()()

    def freeze(self) -> Callable[[], bytes]:
        """Capture the trees, which are replaced and never changed in place."""
        flat = self._trees.reshape(-1)
        return lambda: codec.encode_value(flat) if flat.size else b""

    def restore(self, data: bytes) -> None:
        """Load a saved state; ComponentError for bytes of anything else."""
        if data:
            with self.restoring():
                trees = self._checked(codec.decode_value(types.TENSOR_FLOAT, data))
            self._trees = trees

    def backward(self, ctx: OpContext, grad: Value) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="backward")

    def step(self, ctx: OpContext, grads: Value | None) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="step")

    def _flat(self, params: Value) -> Array:
        if not isinstance(params, np.ndarray) or params.dtype != np.float32 or params.ndim != 1:
            kind = params.dtype if isinstance(params, np.ndarray) else type(params).__name__
            raise ParameterMismatch(f"{self.TYPE_NAME}: trees are float32 [P], not {kind}")
        return params

    def _checked(self, params: Value) -> Table:
        c, flat = self.config, self._flat(params)
        most = c.max_trees * nodes_of(c.leaves) * COLUMNS
        if flat.size > most:
            raise ParameterMismatch(f"{self.TYPE_NAME}: more than {c.max_trees} trees (max_trees)")
        try:
            return checked_trees(flat, c.features, c.leaves, self.outputs, c.max_leaf)
        except ValueError as error:
            raise ParameterMismatch(f"{self.TYPE_NAME}: {error}") from error

    def _rows(self, batch: Value) -> Array:
        c = self.config
        if not isinstance(batch, np.ndarray) or batch.ndim < 2:
            raise TrainingFailed(f"{self.TYPE_NAME}: examples are no tensor [N, {c.features}]")
        rows = np.ascontiguousarray(batch.reshape(len(batch), -1), np.float32)
        if rows.shape[1] != c.features:
            raise TrainingFailed(
                f"{self.TYPE_NAME}: examples have {rows.shape[1]} features, and the trees "
                f"{c.features} (features)"
            )
        return rows

    def _labels(self, target: Value, count: int) -> Array:
        c = self.config
        labels = np.asarray(target)
        if labels.size != count or labels.dtype.kind not in "fiub":
            raise TrainingFailed(
                f"{self.TYPE_NAME}: labels {labels.dtype}{list(labels.shape)} of {count} examples; "
                "there has to be one number for each"
            )
        labels = labels.reshape(-1).astype(np.float64)
        if not np.isfinite(labels).all():
            raise TrainingFailed(f"{self.TYPE_NAME}: a label is NaN or infinite")
        if c.classes and ((labels < 0) | (labels >= c.classes) | (labels % 1 != 0)).any():
            raise TrainingFailed(
                f"{self.TYPE_NAME}: a label is none of the classes 0 to {c.classes - 1} (classes)"
            )
        return labels

    def _sums(self, batch: Value) -> Table:
        """Return what the trees of each output add up to, [N, outputs] float32."""
        rows = self._rows(batch)
        if len(self._trees) == 0 or len(rows) == 0:
            return np.zeros((len(rows), self.outputs), np.float32)
        model = ensemble_model(self._trees, self.config.features, self.config.classes, raw=True)
        found: Table = self.dependency("backend").prepare(model).run([rows])[0]
        return found

    def _loss(self, sums: Table, labels: Array) -> float:
        wide = sums.astype(np.float64)
        if not len(labels):
            return math.nan
        if self.config.classes == 0:
            return float(np.square(wide[:, 0] - labels).mean())
        if self.config.classes == 2:
            wide = np.concatenate([np.zeros_like(wide), wide], axis=1)
        wide -= wide.max(axis=1, keepdims=True)
        logs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        return float(-logs[np.arange(len(labels)), labels.astype(np.int64)].mean())

    def _constants(self, labels: Array) -> Table:
        """Return a tree of one leaf for each output: the best constant for the labels."""
        c = self.config
        if c.classes == 0:
            best = labels.mean(keepdims=True)
        else:
            # One more of each class, so that none that this client lacks is impossible.
            logs = np.log(np.bincount(labels.astype(np.int64), minlength=c.classes) + 1.0)
            best = logs[1:] - logs[:1] if c.classes == 2 else logs - logs.mean()
        made = np.zeros((self.outputs, nodes_of(c.leaves), COLUMNS), np.float32)
        made[:, :, FEATURE] = UNUSED
        made[:, 0, FEATURE] = LEAF
        made[:, 0, NUMBER] = np.clip(best, -c.max_leaf, c.max_leaf)
        return made

    def _grown(self, x: Array, labels: Array, sums: Table, rounds: int) -> Table:
        """Return trees that LightGBM grows on the loss at `sums`."""
        c = self.config
        try:
            lightgbm = importlib.import_module("lightgbm")
        except ImportError as error:
            raise BackendUnavailable(
                f"{self.TYPE_NAME} grows trees with lightgbm, which is not installed here; "
                f"{install(LIGHTGBM.requirement)}"
            ) from error
        several = self.outputs > 1
        one_hot = labels[:, None] == np.arange(self.outputs) if several else labels[:, None]

        def objective(margins: Array, _: Any) -> tuple[Array, Array]:
            """Return gradient and curvature of the loss by each output."""
            wide = np.asarray(margins, np.float64).reshape(len(labels), self.outputs)
            if c.classes == 0:
                grads, curves = wide - one_hot, np.ones_like(wide)
            elif several:
                wide = np.exp(wide - wide.max(axis=1, keepdims=True))
                shares = wide / wide.sum(axis=1, keepdims=True)
                # The factor of Friedman, 2001 (doi:10.1214/aos/1013203451), as LightGBM has it.
                factor = c.classes / (c.classes - 1)
                grads, curves = shares - one_hot, factor * shares * (1 - shares)
            else:
                shares = 1 / (1 + np.exp(-wide))
                grads, curves = shares - one_hot, shares * (1 - shares)
            curves = np.maximum(curves, np.finfo(np.float32).tiny)
            return (grads, curves) if several else (grads[:, 0], curves[:, 0])

        settings = {
            "objective": objective, "num_class": self.outputs, "num_leaves": c.leaves,
            "max_depth": c.max_depth or -1, "min_data_in_leaf": c.min_leaf,
            "learning_rate": c.learning_rate, "lambda_l2": c.l2, "seed": c.seed,
            # The same examples give the same trees.
            "deterministic": True, "force_row_wise": True, "num_threads": 1, "verbosity": -1,
            "boost_from_average": False, "feature_pre_filter": False, "metric": "none",
        }  # fmt: skip
        begin = sums.astype(np.float64)
        data = lightgbm.Dataset(
            x, label=labels, init_score=begin if several else begin[:, 0],
            params={key: value for key, value in settings.items() if key != "objective"},
        )  # fmt: skip
        try:
            made = lightgbm.train(settings, data, num_boost_round=rounds)
            trees = [each["tree_structure"] for each in made.dump_model()["tree_info"]]
        except (lightgbm.basic.LightGBMError, ValueError) as error:
            raise TrainingFailed(f"{self.TYPE_NAME}: LightGBM: {error}") from error
        if not trees:  # nothing is left to split
            trees = [{"leaf_value": 0.0}] * self.outputs
        return np.stack([self._table(tree) for tree in trees])

    def _table(self, tree: Mapping[str, Any]) -> Table:
        """Return a tree that LightGBM dumped; parents stand before their children."""
        made = np.zeros((nodes_of(self.config.leaves), COLUMNS), np.float32)
        made[:, FEATURE] = UNUSED
        waiting, used = [(tree, 0)], 1
        while waiting:
            node, at = waiting.pop()
            if "split_feature" not in node:
                most = self.config.max_leaf
                value = min(max(float(node["leaf_value"]), -most), most)
                made[at, [FEATURE, NUMBER]] = LEAF, value
                continue
            if node["decision_type"] != "<=":
                raise TrainingFailed(f"{self.TYPE_NAME}: a split by {node['decision_type']!r:.20}")
            threshold = float(node["threshold"])
            # Without missing values in training LightGBM takes one for 0.
            left = node["default_left"] if node["missing_type"] == "NaN" else threshold >= 0
            made[at] = node["split_feature"], _rounded(threshold), used, used + 1, left
            waiting += [(node["right_child"], used + 1), (node["left_child"], used)]
            used += 2
        return made


@register_component
class HeldTrees(BoostedTrees):
    """`BoostedTrees` that grow elsewhere, and so need no data source beside them."""

    TYPE_NAME: ClassVar[str] = "bbnode.HeldTrees"
    libraries: ClassVar[tuple[OptionalLibrary, ...]] = ()
    depends: ClassVar[Mapping[str, str]] = {"backend": "compute"}
    needed_for: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def train(self, ctx: OpContext, *, epochs: int, batch: int) -> NoReturn:
        """Refuse."""
        raise UnsupportedByModel(component=self.TYPE_NAME, op="train")


def nodes_of(leaves: int) -> int:
    """Return the nodes of a binary tree with so many leaves."""
    return 2 * leaves - 1


def _rounded(threshold: float) -> np.float32:
    """Return the largest float32 up to a threshold: of float32 the same ones are up to it."""
    near = np.float32(min(max(threshold, -_LARGEST), _LARGEST))
    return near if float(near) <= threshold else np.nextafter(near, np.float32(-np.inf))


def checked_trees(flat: Array, features: int, leaves: int, outputs: int, max_leaf: float) -> Table:
    """Return a vector of trees as a table [T, nodes, 5], read-only; ValueError for what are none.

    Each tree is one: every node but the first has one parent, which stands before it, and the nodes
    that are not used stand at the end.
    """
    nodes = nodes_of(leaves)
    if flat.size % (nodes * COLUMNS * outputs):
        raise ValueError(
            f"{flat.size} numbers are no trees of {leaves} leaves for each of {outputs} output(s)"
        )
    trees = flat.reshape(-1, nodes, COLUMNS).view()
    trees.flags.writeable = False
    if not np.isfinite(trees).all():
        raise ValueError("a tree holds NaN or infinity")
    feature, number = trees[..., FEATURE], trees[..., NUMBER]
    links = trees[..., [LEFT, RIGHT]]
    ways = trees[..., MISSING_LEFT]
    if (feature % 1).any() or (feature < UNUSED).any() or (feature >= features).any():
        raise ValueError(f"a feature is none of 0 to {features - 1}")
    splits, unused = feature >= 0, feature == UNUSED
    if unused[:, 0].any() or (unused[:, :-1] & ~unused[:, 1:]).any():
        raise ValueError("a node that is not used is not at the end of its tree")
    if trees[unused][:, 1:].any() or trees[feature == LEAF][:, LEFT:].any():
        raise ValueError("a leaf, or a node that is not used, has something behind it")
    if not np.isin(ways, (0, 1)).all():
        raise ValueError("where a missing value goes is neither 0 nor 1")
    own = np.arange(nodes)[:, None]
    good = (links % 1 == 0) & (links > own) & (links < (nodes - unused.sum(axis=1))[:, None, None])
    if not good[splits].all():
        raise ValueError("a node behind another is not in its tree")
    tree, _, _ = np.nonzero(np.broadcast_to(splits[..., None], links.shape))
    parents = np.zeros(unused.shape, np.int64)
    np.add.at(parents, (tree, links[splits].reshape(-1).astype(np.int64)), 1)
    wanted = np.where(unused, 0, 1)
    wanted[:, 0] = 0
    if (parents != wanted).any():
        raise ValueError("a node has no parent, or two")
    if (np.abs(number[feature == LEAF]) > max_leaf).any():
        raise ValueError(f"a leaf is beyond {max_leaf:g} (max_leaf)")
    return trees


def scaled(trees: Table, factor: float) -> Table:
    """Return trees whose leaves are so many times as large."""
    leaf = trees[..., FEATURE] == LEAF
    made = trees.copy()
    made[..., NUMBER] = np.where(leaf, trees[..., NUMBER] * np.float32(factor), trees[..., NUMBER])
    return made


def ensemble_model(trees: Table, features: int, classes: int, *, raw: bool = False) -> ModelProto:
    """Return trees as an ONNX model, by a TreeEnsembleRegressor of `ai.onnx.ml`; see `export`.

    With `raw` its output is "sums" [N, outputs].
    """
    outputs = classes if classes > 2 else 1
    used = trees[..., FEATURE] != UNUSED
    number = np.arange(len(trees))[:, None]
    node = np.arange(trees.shape[1])[None]
    leaf = trees[..., FEATURE] == LEAF

    def whole(values: Array, where: npt.NDArray[np.bool_] = used) -> list[int]:
        found: list[int] = np.broadcast_to(values, used.shape)[where].astype(np.int64).tolist()
        return found

    def real(values: Array, where: npt.NDArray[np.bool_]) -> list[float]:
        found: list[float] = values[where].tolist()
        return found

    def column(at: int) -> Array:
        return np.where(leaf, 0, trees[..., at])

    made = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["sums"], domain=ONNX_ML_DOMAIN, n_targets=outputs,
        nodes_treeids=whole(number), nodes_nodeids=whole(node),
        nodes_featureids=whole(column(FEATURE)), nodes_values=real(column(NUMBER), used),
        nodes_truenodeids=whole(column(LEFT)), nodes_falsenodeids=whole(column(RIGHT)),
        nodes_missing_value_tracks_true=whole(column(MISSING_LEFT)),
        nodes_modes=["LEAF" if is_leaf else "BRANCH_LEQ" for is_leaf in leaf[used]],
        target_treeids=whole(number, leaf), target_nodeids=whole(node, leaf),
        target_ids=whole(number % outputs, leaf), target_weights=real(trees[..., NUMBER], leaf),
    )  # fmt: skip
    info, nodes, tensors = helper.make_tensor_value_info, [made], []
    results = [info("sums", TensorProto.FLOAT, ["batch", outputs])]
    if not raw and classes == 0:
        nodes.append(helper.make_node("Identity", ["sums"], ["values"]))
        results = [info("values", TensorProto.FLOAT, ["batch", 1])]
    elif not raw:
        if classes == 2:
            tensors = [numpy_helper.from_array(np.zeros(1, np.float32), "nothing")]
            nodes += [
                helper.make_node("Mul", ["sums", "nothing"], ["zeros"]),
                helper.make_node("Concat", ["zeros", "sums"], ["logits"], axis=1),
            ]
        logits = "logits" if classes == 2 else "sums"
        nodes += [
            helper.make_node("Softmax", [logits], ["probabilities"], axis=1),
            helper.make_node("ArgMax", [logits], ["label"], axis=1, keepdims=0),
        ]
        results = [
            info("probabilities", TensorProto.FLOAT, ["batch", classes]),
            info("label", TensorProto.INT64, ["batch"]),
        ]
    x = info("x", TensorProto.FLOAT, ["batch", features])
    graph = helper.make_graph(nodes, "boosted_trees", [x], results, tensors)
    opsets: Iterable[Any] = [
        helper.make_opsetid("", ONNX_OPSET_VERSION), helper.make_opsetid(ONNX_ML_DOMAIN, _ML_OPSET)
    ]  # fmt: skip
    return helper.make_model(graph, ir_version=FRAMEWORK_IR_VERSION, opset_imports=[*opsets])
