"""Components: contracts, registry and the concretes that ship with bbnode.

Rule: importing this package imports no concrete; each name is loaded when it is asked for,
because ONNX Runtime and the like take their time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bbnode.components.backends.ort import OrtBackend, OrtBackendConfig
    from bbnode.components.backends.reference import ReferenceBackend, ReferenceBackendConfig
    from bbnode.components.contracts import Component, ComponentError, OpContext, offload
    from bbnode.components.data.arrays import ArrayDataSource, ArrayDataSourceConfig
    from bbnode.components.data.sklearn import SklearnDataSource, SklearnDataSourceConfig
    from bbnode.components.fedavg import FedAvg, FedAvgConfig
    from bbnode.components.models.mlp import mlp_forward
    from bbnode.components.models.onnx_model import OnnxModel, OnnxModelConfig
    from bbnode.components.peer_registry.client import (
        GlobalRegistryClient,
        GlobalRegistryClientConfig,
        GlobalRegistryView,
        GlobalRegistryViewConfig,
    )
    from bbnode.components.peer_registry.server import (
        GlobalRegistryServer,
        GlobalRegistryServerConfig,
    )
    from bbnode.components.registry import concrete, register_component
    from bbnode.components.selectors import (
        ConnectedView,
        ConnectedViewConfig,
        ConstantView,
        ConstantViewConfig,
    )
    from bbnode.components.settings import local_setting, path_setting

_MODULE_OF = {
    "ArrayDataSource": "data_sources",
    "ArrayDataSourceConfig": "data_sources",
    "Component": "contracts",
    "ComponentError": "contracts",
    "ConnectedView": "selectors",
    "ConnectedViewConfig": "selectors",
    "ConstantView": "selectors",
    "ConstantViewConfig": "selectors",
    "FedAvg": "fedavg",
    "FedAvgConfig": "fedavg",
    "GlobalRegistryClient": "global_registry_client",
    "GlobalRegistryClientConfig": "global_registry_client",
    "GlobalRegistryServer": "global_registry",
    "GlobalRegistryServerConfig": "global_registry",
    "GlobalRegistryView": "global_registry_client",
    "GlobalRegistryViewConfig": "global_registry_client",
    "OnnxModel": "onnx_model",
    "OnnxModelConfig": "onnx_model",
    "OpContext": "contracts",
    "OrtBackend": "ort_backend",
    "OrtBackendConfig": "ort_backend",
    "ReferenceBackend": "reference_backend",
    "ReferenceBackendConfig": "reference_backend",
    "SklearnDataSource": "sklearn_data_source",
    "SklearnDataSourceConfig": "sklearn_data_source",
    "concrete": "registry",
    "local_setting": "settings",
    "mlp_forward": "mlp",
    "offload": "contracts",
    "path_setting": "settings",
    "register_component": "registry",
}

__all__ = [
    "ArrayDataSource",
    "ArrayDataSourceConfig",
    "Component",
    "ComponentError",
    "ConnectedView",
    "ConnectedViewConfig",
    "ConstantView",
    "ConstantViewConfig",
    "FedAvg",
    "FedAvgConfig",
    "GlobalRegistryClient",
    "GlobalRegistryClientConfig",
    "GlobalRegistryServer",
    "GlobalRegistryServerConfig",
    "GlobalRegistryView",
    "GlobalRegistryViewConfig",
    "OnnxModel",
    "OnnxModelConfig",
    "OpContext",
    "OrtBackend",
    "OrtBackendConfig",
    "ReferenceBackend",
    "ReferenceBackendConfig",
    "SklearnDataSource",
    "SklearnDataSourceConfig",
    "concrete",
    "local_setting",
    "mlp_forward",
    "offload",
    "path_setting",
    "register_component",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
