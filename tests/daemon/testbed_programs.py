"""Programs for the tests of testbeds, in a file of their own as an author would have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bbnode.components import ArrayDataSource, ConnectedView, OrtBackend, concrete
from bbnode.components.data.arrays import ArrayDataSourceConfig
from bbnode.dsl import DataSourceSlot, Graph, Module, types
from bbnode.examples.custom_index import BruteForceIndex
from bbnode.examples.multi_target import Retrieval as _Retrieval


class Retrieval(_Retrieval):
    """Documents and questions, with the components that it needs."""

    def bindings(self) -> Mapping[str, Any]:
        selectors = dict.fromkeys(("encoders", "stores", "doors"), ConnectedView)
        return {**selectors, "compute": OrtBackend, "index": BruteForceIndex}


@dataclass(kw_only=True, eq=False)
class Reading(Module):
    """Outputs the labels of a batch from a file that the program names."""

    home = "reader"
    path: str

    def body(self, g: Graph) -> None:
        source = concrete(ArrayDataSource, ArrayDataSourceConfig(path=self.path))
        tick = g.input("tick", types.TRIGGER)
        _, labels = DataSourceSlot("data", concrete=source).next_batch(g, after=tick)
        g.output("labels", labels)
