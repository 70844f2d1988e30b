"""Modules under the names that they had before they moved into packages: they import, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "whet.adapters": "whet.models.adapter_files",
    "whet.batches": "whet.data.batches",
    "whet.callbacks": "whet.training.callbacks",
    "whet.estimate": "whet.models.sizes",
    "whet.fields": "whet.config.fields",
    "whet.logging": "whet.training.loggers",
    "whet.phases": "whet.training.phases",
    "whet.reference_cache": "whet.training.reference_cache",
    "whet.sampling": "whet.config.sampling",
    "whet.trainer": "whet.training.trainer",
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, _Loader()) if fullname in MOVED else None


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {MOVED[spec.name]}.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(MOVED[spec.name])
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # importlib has just written the old name's


sys.meta_path.append(_Finder())
