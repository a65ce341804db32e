"""Faults that were planted in a method are found by the claim of that method.

Rule: a row edits one line of the source as a hasty hand would, so that the code is wrong and still
runs; the named check, which `bbnode verify` prints and `scripts/reproduce` claims, has to fail.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bbnode.components import Metadata, NormClipping, TopKCodec, concrete
from bbnode.verify import all_checks, judged
from reproduce import (
    _federation,
    byzantine,
    compression,
    dpsgd2017,
    experiment,
    mcmahan2017,
    personal,
)
from reproduce._data import digits
from reproduce.experiment import Claim

CHECKS = {each.name: each for each in all_checks()}


class Planted(NamedTuple):
    """A fault: which function has it, the text that is replaced and by what, who finds it."""

    fault: str
    where: str  # "package.module:Class.method"
    old: str
    new: str
    check: str


DRIFT = "bbnode.programs.parts.clients"
SERVER = "bbnode.programs.parts.servers"
OPTIMIZERS = "bbnode.components.autodiff.optimizers"
WEIGHTED = "bbnode.components.aggregators.weighted"
KRUM = "bbnode.components.aggregators.krum"
BUFFER = "bbnode.components.asynchronous.buffer:UpdateBuffer"
PERSONAL = "bbnode.programs.parts.personal"

PLANTED = [
    # rounds of a server and clients
    Planted("an unweighted mean", "bbnode.components.aggregators.fedavg:FedAvg.weights",
            "capped([part.num_samples for part in parts], self.config.max_share)",
            "[1] * len(parts)", "FedAvg"),
    Planted("one epoch, whatever is asked",
            "bbnode.programs.federated:FederatedTraining.local_training",
            "epochs=self.epochs", "epochs=1", "FedAvg"),
    Planted("deltas that are added twice",
            "bbnode.programs.federated:FederatedTraining.server_update",
            "add(g, weights, mean)", 'add(g, BackendSlot("compute").add(g, weights, mean), mean)',
            "FedAvg, deltas"),
    Planted("a gradient of the sum", "bbnode.programs.federated:FederatedSGD.body",
            "asked.respond(compute.concat(g, *found, grads, axis=0))",
            "asked.respond(compute.concat(g, *found, compute.mul(g, grads, number), axis=0))",
            "FederatedSGD"),
    # optimizers of the server
    Planted("the wrong server's learning rate", f"{SERVER}:SGD.server_model",
            "float(self.server_learning_rate)", "float(p.learning_rate)", "FedOpt"),
    Planted("a gradient of the wrong sign", f"{SERVER}:SGD.server_update",
            "compute.sub(g, old, mean)", "compute.sub(g, mean, old)", "FedOpt"),
    Planted("momentum that is applied twice", f"{SERVER}:Momentum.optimizer",
            'nesterov = self.server_nesterov', "nesterov = True", "FedAvgM"),
    Planted("no look ahead", f"{SERVER}:Momentum.optimizer",
            '"nesterov": nesterov', '"nesterov": False', "FedAvgM, Nesterov"),
    Planted("a bias correction where there is none", f"{SERVER}:Adam.optimizer",
            '"bias_correction": False', '"bias_correction": True', "FedAdam"),
    Planted("squares that begin with 0", f"{SERVER}:Adagrad.optimizer",
            '"initial_square": square', '"initial_square": 0.0', "FedAdagrad"),
    Planted("Adam in place of Yogi", f"{SERVER}:Yogi.optimizer",
            '"optimizer": "yogi"', '"optimizer": "adam"', "FedYogi"),
    Planted("Yogi's sign turned", f"{OPTIMIZERS}:_moments",
            'b.op("Sub", state["square"], new)', 'b.op("Sub", new, state["square"])', "FedYogi"),
    Planted("a server's state that begins anew", f"{SERVER}:SGD.server_model",
            "keep_optimizer_state=True", "keep_optimizer_state=False", "FedAvgM"),
    # optimizers of clients
    Planted("a missing bias correction", f"{OPTIMIZERS}:_moments",
            "if not s.bias_correction:", "if True:", "client: adam"),
    Planted("a step by the square, without its root", f"{OPTIMIZERS}:_moments",
            'b.op("Div", b.op("Sqrt", square), root)', 'b.op("Div", square, root)',
            "client: adam"),
    Planted("weight decay in the gradient of AdamW", f"{OPTIMIZERS}:_shrunk",
            "if not decay:", "if True:", "client: decoupled weight decay"),
    Planted("weight decay left out", f"{OPTIMIZERS}:_decayed_gradient",
            "if not decay:", "if True:", "client: weight decay"),
    Planted("a schedule that begins anew", "bbnode.components.models.onnx_model:OnnxModel._train",
            "most = before.steps + self.config.max_steps if self.config.max_steps else math.inf",
            "most = 1", "client: momentum"),
    # clients that differ
    Planted("no proximal term", f"{DRIFT}:Proximal.local_training",
            "proximal=float(self.proximal)", "proximal=0.0", "FedProx"),
    Planted("a proximal term of half", f"{DRIFT}:Proximal.local_training",
            "proximal=float(self.proximal)", "proximal=float(self.proximal) / 2", "FedProx"),
    Planted("no S/N in SCAFFOLD", f"{DRIFT}:ControlVariates.combined",
            "compute.mul(g, turned, share)", "turned", "SCAFFOLD, a part of all"),
    Planted("a stale control variate", f"{DRIFT}:ControlVariates.combined",
            '_vector(p, "own_control").load_parameters(g, kept)', "pass", "SCAFFOLD"),
    Planted("a control variate of the server that stays", f"{DRIFT}:ControlVariates.combined",
            '_vector(p, "control").apply_delta(g, compute.mul(g, turned, share))', "pass",
            "SCAFFOLD"),
    Planted("a correction of the wrong sign", f"{DRIFT}:ControlVariates.client_update",
            "compute.sub(g, control, own)", "compute.sub(g, own, control)", "SCAFFOLD"),
    Planted("variates that forget the rate", f"{DRIFT}:ControlVariates.client_update",
            "compute.gather(g, work, g.constant(1), axis=0)",
            "compute.gather(g, work, g.constant(0), axis=0)", "SCAFFOLD"),
    Planted("moves that are not normalised", f"{DRIFT}:Normalised.local_training",
            "compute.div(g, p.answer(g, model.params(g), weights), norm)",
            "compute.div(g, p.answer(g, model.params(g), weights), g.constant([0.3]))",
            "FedNova, unequal work"),
    Planted("the norm of plain steps beside a momentum", f"{DRIFT}:Normalised._norm",
            "if m:", "if m < 0:", "FedNova, momentum"),
    Planted("losses that weigh nothing", f"{DRIFT}:Fair.client_update",
            "(self.q, self.q - 1)", "(0.0, -1.0)", "q-FedAvg"),
    Planted("a curvature without its q", f"{DRIFT}:Fair.client_update",
            "g.constant(float(self.q))", "g.constant(1.0)", "q-FedAvg"),
    Planted("a Lipschitz constant that nobody reads", f"{DRIFT}:Fair.client_update",
            "float(self.lipschitz or 1 / p.learning_rate)", "1 / p.learning_rate",
            "q-FedAvg, L"),
    Planted("local layers that are averaged", f"{PERSONAL}:Layers._merged",
            "_slice(g, own, begin, end)", "_slice(g, shared, 0, end - begin)", "FedPer"),
    Planted("head and body trained at once", f"{PERSONAL}:Alternating.local_training",
            "frozen=shared", 'frozen=""', "FedRep"),
    Planted("normalisation that is shared", f"{PERSONAL}:Layers.kept",
            "fitting | _normalising(p) & {*p.layout}", '{"bn.mean", "bn.var"}', "FedBN"),
    Planted("an own model that nothing holds", f"{PERSONAL}:OwnModel.local_training",
            "proximal=float(self.proximal)", "proximal=0.0", "Ditto"),
    Planted("an own model near itself", f"{PERSONAL}:OwnModel.local_training",
            "g, weights, epochs", "g, None, epochs", "Ditto"),
    Planted("inner steps by the epochs", f"{DRIFT}:InnerSteps.client_model",
            "max_steps=self.inner_steps", "max_steps=1", "DiLoCo"),
    Planted("an inner optimizer that begins anew",
            "bbnode.components.models.onnx_model:OnnxModel.load_parameters",
            "if not self.config.keep_optimizer_state:", "if True:", "DiLoCo"),
    Planted("every client begins with the first weights",
            "bbnode.programs.parts.courses:InTurn.body",
            "loaded = p.server_model.load_parameters(g, weights)", "loaded = weights", "Cyclic"),
    Planted("edges that count once each",
            "bbnode.programs.parts.courses:TwoLevels.respond",
            "g.bundle([*combined])",
            "g.bundle([combined[0], g.constant(Metadata(num_samples=1), after=combined[0])])",
            "Hierarchical"),
    # no rounds
    Planted("no staleness weights", f"{BUFFER}.discount",
            "float((1.0 + staleness) ** -config.exponent)", "1.0", "FedBuff"),
    Planted("a staleness that is one too many", f"{BUFFER}.discount",
            "(1.0 + staleness)", "(2.0 + staleness)", "FedAsync, polynomial"),
    Planted("a hinge that begins at once", f"{BUFFER}.discount",
            "(staleness - config.hinge_at)", "staleness", "FedAsync, hinge"),
    Planted("a sum in the place of a mean", f"{BUFFER}.collect",
            "self._sum / np.float32(self._updates)", "self._sum", "FedBuff"),
    Planted("old weights that stay whole", f"{BUFFER}.take",
            "self._kept *= 1 - share", "self._kept *= 1", "FedAsync, constant"),
    # liars
    Planted("Krum against all others", f"{KRUM}:krum_scores",
            "max(len(squared) - byzantine - 2, 1)", "len(squared) - 1", "Krum"),
    Planted("Krum's own distance counts", f"{KRUM}:krum_scores",
            "[:, 1 : near + 1]", "[:, :near]", "Krum"),
    Planted("MultiKrum of one more", f"{KRUM}:MultiKrum.combine",
            "len(parts) - liars - 2", "len(parts) - liars", "MultiKrum"),
    Planted("Bulyan that keeps the liars' values", f"{KRUM}:Bulyan.combine",
            "len(parts) - 4 * liars", "len(parts) - 2 * liars", "Bulyan"),
    Planted("a trimmed mean that trims one less",
            "bbnode.components.aggregators.robust:TrimmedMean.combine",
            "cut = self.enough(parts)", "cut = self.enough(parts) - 1", "TrimmedMean"),
    Planted("the lower quartile for a median",
            "bbnode.components.aggregators.robust:Median.combine",
            "(count - 1) // 2, count // 2", "count // 4, count // 4", "Median"),
    Planted("a mean for a geometric median", f"{WEIGHTED}:GeometricMedian.combine",
            "np.maximum(away, self.config.smoothing)", "np.ones_like(away)", "GeometricMedian"),
    Planted("no clipping of moves", f"{WEIGHTED}:NormClipping.combine",
            "1.0 if length <= bound else bound / length", "1.0", "NormClipping"),
    Planted("trust of those who point back", f"{WEIGHTED}:FLTrust.combine",
            "max(dot(each, own) / (size * length), 0.0)", "abs(dot(each, own)) / (size * length)",
            "FLTrust"),
    Planted("moves of their own length", f"{WEIGHTED}:FLTrust.combine",
            "length / size if size else 0.0", "1.0", "FLTrust"),
    # privacy
    Planted("half the noise", "bbnode.components.privacy.release:PrivateSum.release",
            "discrete.drawn(c.size, DEVIATION_STEPS,",
            "discrete.drawn(c.size, DEVIATION_STEPS // 2,",
            "DPFedAvg, noise"),
    Planted("no clipping by clients", "bbnode.programs.parts.privacy:ClientPrivacy.protected",
            "compute.mul(g, tensor, factor)", "tensor", "DPFedAvg, both clip"),
    Planted("no clipping by the server", "bbnode.components.privacy.release:PrivateSum.release",
            "discrete.clipped(wide[: c.size], norm * _WITHIN)", "wide[: c.size]",
            "DPFedAvg, both clip"),
    Planted("a sum over those who answered, twice",
            "bbnode.components.privacy.release:PrivateSum.release",
            "step / c.clients", "step / (2 * c.clients)", "DPFedAvg"),
    Planted("half the noise of examples", "bbnode.components.privacy.model:PrivateModel._train",
            "discrete.drawn_finely(sums.size, ctx.random_bytes(discrete.KEY_BYTES))",
            "discrete.drawn_finely(sums.size, ctx.random_bytes(discrete.KEY_BYTES)) // 2",
            "DP-SGD, noise"),
    Planted("examples that are not clipped", "bbnode.components.privacy.model:PrivateModel._sums",
            "self.config.clip * _WITHIN", "1e6", "DP-SGD"),
    Planted("an epsilon of half", "bbnode.components.privacy.release:PrivateSum.release",
            '"epsilon": epsilon_of', '"epsilon": 0.5 * epsilon_of', "DPFedAvg, epsilon"),
    # peers
    Planted("the wrong mixing weights", "bbnode.components.gossip.topology:metropolis",
            "1 / (1 + max(len(mine), degrees[other]))", "1 / (1 + len(mine))", "D-PSGD, a star"),
    Planted("mixing weights of half", "bbnode.components.gossip.topology:metropolis",
            "1 / (1 + max", "1 / (2 + max", "D-PSGD, ring"),
    Planted("Moshpit along one axis", "bbnode.components.gossip.topology:on_grid",
            "side ** (round_ % axes)", "side**0", "Moshpit, averaging"),
    Planted("a third of the way", "bbnode.components.gossip.pairwise:PairwiseMean.answer",
            "- self._held) / 2", "- self._held) / 3", "PairwiseAveraging"),
    # pooled
    Planted("a deviation that forgets the means",
            "bbnode.components.data.statistics:Moments.merged",
            "+ np.square(delta) * (self.count * share)", "", "Statistics"),
    Planted("centroids of the clients' own weight alike",
            "bbnode.components.aggregators.clusters:PooledClusters.merge",
            "told.sum(axis=0), samples, {}", "told[0], samples, {}", "KMeans"),
    Planted("trees that weigh alike", "bbnode.components.aggregators.trees:PooledTrees.merge",
            "count / total", "1 / len(samples)", "Trees"),
    # codes and selection
    Planted("no memory of what was lost", "bbnode.components.codecs.base:FloatCodec.encode",
            "flat = flat + before.error", "pass", "codec: top-k"),
    Planted("no penalty of the slow", "bbnode.components.selectors.learned:Oort.scores",
            "if arm.took_ns > preferred:", "if False:", "Oort"),
    Planted("no exploration bonus", "bbnode.components.selectors.learned:Oort.scores",
            "0.1 * math.log", "0.0 * math.log", "Oort"),
]  # fmt: skip


@contextmanager
def planted(row: Planted) -> Iterator[None]:
    """Replace a text in a function's source while the block runs."""
    module_name, _, path = row.where.partition(":")
    module = importlib.import_module(module_name)
    *outer, name = [part for part in path.split(".") if part != "fget"]
    owner: Any = reduce(getattr, outer, module)
    real = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(getattr(real, "fget", real)))
    assert source.count(row.old) >= 1, f"{row.where} has no {row.old!r} any more"
    edited = source.replace(row.old, row.new)
    # A method's `super()` wants the class in a cell.
    wrapped = f"def _make(__class__):\n{textwrap.indent(edited, '    ')}\n    return {name}\n"
    scope = {"Metadata": Metadata, **vars(module)}
    flags = __future__.annotations.compiler_flag
    exec(compile(wrapped, f"<{row.fault}>", "exec", flags), scope)
    made = scope["_make"](owner)
    setattr(owner, name, made)
    try:
        yield
    finally:
        setattr(owner, name, real)


@pytest.mark.slow
@pytest.mark.parametrize("row", PLANTED, ids=lambda row: row.fault)
def test_a_planted_fault_is_found_by_the_claim_of_its_method(row: Planted) -> None:
    with planted(row):
        outcome = judged(CHECKS[row.check])
    if outcome.missing:
        pytest.skip(outcome.error)
    assert not outcome.ok, (
        f"{row.fault}: {outcome.deviation:.1e} is within {outcome.check.tolerance}"
    )


class PlantedInRun(NamedTuple):
    """A fault that a part of an experiment finds."""

    row: Planted  # its check is the experiment
    claims: Callable[[Path], list[Claim]]


def lies_about_clipped(folder: Path) -> list[Claim]:
    """Return the claim of byzantine of one rule, under two attacks."""
    trial = byzantine.Trial(folder, 0)
    pairs = [
        (
            trial.accuracy(NormClipping, attack, byzantine.MANY),
            trial.in_numpy("NormClipping", attack, byzantine.MANY),
        )
        for attack in (byzantine.SIGN, byzantine.NOISE)
    ]
    return [experiment.beside("NormClipping", pairs)]


def answers_of_top_k(folder: Path) -> list[Claim]:
    """Return the claims of compression of one codec, without error feedback."""
    examples = digits(folder, 0)
    codec = concrete(TopKCodec, fraction=0.01, error_feedback=False)
    found = {
        (compression.WHOLE, None): compression.trained(None, examples, 0),
        ("top 1 %", False): compression.trained(codec, examples, 0),
    }
    runs = {key: compression.losses_in_numpy(*key, examples, 0) for key in found}
    return [*compression.of_bytes(found), *compression.of_losses(found, runs)]


SPARSE = "bbnode.components.codecs.sparse"
IN_RUNS = [
    PlantedInRun(
        Planted("one epoch, whatever is asked",
                "bbnode.programs.federated:FederatedTraining.local_training",
                "epochs=self.epochs", "epochs=min(self.epochs, 1)", "mcmahan2017"),
        lambda folder: mcmahan2017.by_hand(digits(folder, 0), 0)),
    PlantedInRun(
        Planted("a gradient of the sum", "bbnode.programs.federated:FederatedSGD.body",
                "asked.respond(compute.concat(g, *found, grads, axis=0))",
                "asked.respond(compute.concat(g, *found, compute.mul(g, grads, number), axis=0))",
                "mcmahan2017"),
        lambda folder: mcmahan2017.by_hand(digits(folder, 0), 0)),
    PlantedInRun(
        Planted("local layers that are averaged", f"{PERSONAL}:Layers._merged",
                "_slice(g, own, begin, end)", "_slice(g, shared, 0, end - begin)",
                "personal"),
        personal.of_lines),
    PlantedInRun(
        Planted("an own model that is held half", f"{PERSONAL}:OwnModel.local_training",
                "proximal=float(self.proximal)", "proximal=float(self.proximal) / 2", "personal"),
        personal.of_lines),
    PlantedInRun(
        Planted("mixing weights of half", "bbnode.components.gossip.topology:metropolis",
                "1 / (1 + max", "1 / (2 + max", "dpsgd2017"),
        lambda _: dpsgd2017.of_gaps()),
    PlantedInRun(
        Planted("indices of four bytes", f"{SPARSE}:_index_type",
                '"<u2" if n <= _NARROW', '"<u4" if n <= _NARROW', "compression"),
        answers_of_top_k),
    PlantedInRun(
        Planted("the smallest values", f"{SPARSE}:TopKCodec.compress",
                "[flat, np.array([k], np.int64)]", "[1 / (1 + abs(flat)), np.array([k], np.int64)]",
                "compression"),
        answers_of_top_k),
    PlantedInRun(
        Planted("no clipping of moves", f"{WEIGHTED}:NormClipping.combine",
                "1.0 if length <= bound else bound / length", "1.0", "byzantine"),
        lies_about_clipped),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("each", IN_RUNS, ids=lambda each: f"{each.row.check}: {each.row.fault}")
def test_a_planted_fault_is_found_by_the_claims_of_an_experiment(
    each: PlantedInRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What was compiled without the fault would be taken from the cache, and the other way round.
    monkeypatch.setattr(_federation, "_planned", _federation._planned.__wrapped__)
    monkeypatch.setattr(_federation, "_compiled", _federation._compiled.__wrapped__)
    assert [claim.text for claim in each.claims(tmp_path) if not claim.holds] == []
    with planted(each.row):
        claims = each.claims(tmp_path)
    assert [claim.text for claim in claims if not claim.holds], [each.figures for each in claims]


def test_each_check_that_finds_one_is_a_claim_of_an_experiment() -> None:
    claimed = {name for each in experiment.names() for name in experiment.load(each).methods}
    # What no paper of ours has a figure of: `bbnode verify` alone claims it.
    without = {"Cyclic", "Hierarchical", "Statistics"}
    assert {row.check for row in PLANTED} - claimed == without
    assert claimed <= CHECKS.keys()
