"""The programs that ship, each with arguments that bring in all that it can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.programs.files import CLASSES, FEATURES, linear
from tests.programs.strategies.federation import normalised

MLP = (FEATURES, 6, CLASSES)
PLAIN: Mapping[str, Any] = {"model": (FEATURES, CLASSES)}
HOOKS: Mapping[str, Mapping[str, Any]] = {
    "codes": {"deltas": True, "codec": "bbnode.Int8Codec", "codec_down": "bbnode.BFloat16Codec"},
    "optimizer": {
        "optimizer": "adamw", "schedule": "cosine", "decay_steps": 9, "clip_norm": 1.0, "epochs": 2,
        "batch": 8, "learning_rate": 0.01, "seed": 3, "metrics": ("accuracy", "f1_macro"),
    },
    "round": {"clients": 7, "quorum": 3, "deadline_s": 5.0, "selector": "bbnode.RoundRobin"},
    "clients": {"evaluate": "clients", "metrics": ("accuracy", "perplexity")},
    "both": {"evaluate": "both", "weighted": False, "deltas": True},
    "krum": {"aggregator": "bbnode.MultiKrum", "evaluate": "none"},
}  # fmt: skip
# Of each program: names of sets of arguments, and these.
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "AgreeOnSchema": {"": {}},
    "AsynchronousTraining": {"": {**PLAIN, "evaluate": "server"}},
    "CyclicTraining": {"": PLAIN, "both": {**PLAIN, **HOOKS["both"]}},
    "DPFedAvg": {
        "": {**PLAIN, "epsilon": 1e3},
        "all": {
            **PLAIN, "epsilon": 1e3, "population": 100, "quantile": 0.5, "clip": 0.3, "noise": 0.5,
            "accountant": "pld", "clip_rate": 0.1, "count_noise": 2.0, "delta": 1e-6,
        },
        "codes": {**PLAIN, "epsilon": 1e3, "codec_down": "bbnode.BFloat16Codec"},
    },
    "DPSGDTraining": {
        "": {**PLAIN, "example_epsilon": 1e3},
        "all": {
            **PLAIN, "example_epsilon": 1e3, "example_noise": 0.7, "example_clip": 0.5,
            "accountant": "pld", "optimizer": "adam",
        },
    },
    "DecentralizedSGD": {"": PLAIN, "all": {**PLAIN, "graph": "torus", "staleness": 2}},
    "DiLoCo": {
        "": {**PLAIN, "inner_steps": 3},
        "plain": {**PLAIN, "inner_steps": 3, "codec": None, "weighted": True,
                  "learning_rate": 0.01, "server_momentum": 0.8, "server_nesterov": False},
    },
    "Ditto": {
        "": PLAIN,
        "all": {**PLAIN, "proximal": 0.5, "personal_epochs": 2, "deltas": True, "evaluate": "none"},
    },
    "EmbedAndSearch": {"": {"model": "bbnode.TextEncoder"}},
    "FLTrustTraining": {"": PLAIN, "none": {**PLAIN, "evaluate": "none", "epochs": 2}},
    "FedAdagrad": {"": PLAIN, "tau": {**PLAIN, "tau": 0.02, "server_learning_rate": 0.3}},
    "FedAdam": {
        "": PLAIN, "tau": {**PLAIN, "tau": 0.02, "beta1": 0.8, "beta2": 0.9},
        "statistics": {"model": normalised(), "mode": "train", "deltas": True},
    },
    "FedAsync": {
        "": PLAIN,
        "all": {**PLAIN, "staleness": "hinge", "hinge_slope": 2.0, "hinge_at": 1, "mixing": 0.3,
                "max_staleness": 5, "deadline_s": 7.0},
    },
    "FedAvgM": {"": PLAIN, "nesterov": {**PLAIN, "server_nesterov": True, "deltas": True}},
    "FedBN": {
        "": {"model": normalised()},
        "local": {"model": normalised(), "local": ("head",), "evaluate": "none"},
    },
    "FedBuff": {
        "": PLAIN,
        "codes": {**PLAIN, "buffer": 3, "codec": "bbnode.Int8Codec", "server_learning_rate": 0.5},
    },
    "FedNova": {
        "": PLAIN,
        "proximal": {**PLAIN, "proximal": 0.5}, "momentum": {**PLAIN, "momentum": 0.9},
    },
    "FedOpt": {"": PLAIN, "rate": {**PLAIN, "server_learning_rate": 0.5}},
    "FedPer": {
        "": {**PLAIN, "local": ("*.bias",)},
        "deltas": {"model": MLP, "local": ("layer1.*",), "deltas": True, "evaluate": "none"},
    },
    "FedProx": {
        "": PLAIN, "all": {**PLAIN, "proximal": 0.5},
        **{name: {**PLAIN, **HOOKS[name]} for name in HOOKS},
    },
    "FedRep": {
        "": {**PLAIN, "local": ("*.bias",)},
        "heads": {"model": MLP, "local": ("layer1.*",), "head_epochs": 3},
    },
    "FedYogi": {"": PLAIN, "tau": {**PLAIN, "tau": 0.02}},
    "FederatedHistograms": {"": {}},
    "FederatedKMeans": {"": {"features": 3}},
    "FederatedQuantiles": {"": {}},
    "FederatedSGD": {
        "": PLAIN, "optimizer": {**PLAIN, **HOOKS["optimizer"], "epochs": 1},
        "round": {**PLAIN, **HOOKS["round"]},
    },
    "FederatedStatistics": {"": {}},
    "FederatedTraining": {
        "": PLAIN, **{name: {**PLAIN, **HOOKS[name]} for name in HOOKS},
        "numbers": {"model": (FEATURES, 1), "loss": "mse", "metrics": ("mae", "r2")},
    },
    "FederatedTrees": {"": {"features": 3}},
    "GossipTraining": {
        "": PLAIN, "optimizer": {**PLAIN, **HOOKS["optimizer"]},
        "pairwise": {**PLAIN, "mix": "pairwise", "deadline_s": 3.0, "evaluate": False},
        "push_pull": {**PLAIN, "mix": "push_pull"}, "wide": {**PLAIN, "neighbours": 3},
    },
    "HierarchicalTraining": {
        "": PLAIN,
        "all": {**PLAIN, "edges": 3, "edge_quorum": 2, "edge_deadline_s": 4.0, "clients": 5,
                "quorum": 2, "selector": "bbnode.ConstantView", "deadline_s": 9.0},
        "codes": {**PLAIN, **HOOKS["codes"]},
    },
    "MoshpitAveraging": {"": {}},
    "MoshpitTraining": {"": PLAIN, "side": {**PLAIN, "side": 3, "axes": 3}},
    "PairwiseAveraging": {"": {}},
    "PeerToPeerSearch": {"": {"dimensions": 4}},
    "Pipeline": {"": {"model": linear()}},
    "QFedAvg": {"": PLAIN, "all": {**PLAIN, "q": 2.0, "lipschitz": 5.0, "evaluate": "clients"}},
    "RoutedSearch": {"": {}},
    "Scaffold": {
        "": PLAIN, "all": {**PLAIN, "population": 20, "weighted": True, "evaluate": "clients"},
        "codes": {**PLAIN, "codec": "bbnode.Int8Codec"},
    },
    "SecureTraining": {
        "": PLAIN,
        "groups": {**PLAIN, "clients": 12, "groups": 3, "clip": 0.5, "norm": 2.0,
                   "corrupt": 0.05},
        "weighted": {**PLAIN, "weighted": True, "max_samples": 1000, "threshold": 4},
        "noise": {**PLAIN, "clients": 8, "norm": 1.0, "client_noise": 0.1, "neighbours": 6,
                  "corrupt": 0.1, "levels": 512},
    },
    "ShardedSearch": {"": {}},
    "SplitLearning": {"": {"model": MLP, "cut": "layer0.out"}},
    "SwarmTraining": {
        "": PLAIN, "all": {**PLAIN, "peers": 5, "quorum": 2, "aggregator": "bbnode.Median"},
    },
    "VectorStore": {"": {}},
    "VerticalLearning": {"": {"model": (9, 8, CLASSES), "bottoms": ((4, 6, 5), (3, 6, 4))}},
}  # fmt: skip
