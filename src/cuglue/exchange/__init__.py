"""Exporting memory to array libraries: DLPack, the CUDA array interface, NumPy; and who still holds what was exported.

To be an array, inherit :class:`~cuglue.exchange.view.Exporter`; to stand behind arrays, answer
:class:`~cuglue.exchange.owner.ExportOwner`.
"""

from .owner import BlockOwner, ExportOwner
from .tokens import Export, ExportLedger, ExportToken
from .view import ArrayView, Exporter

__all__ = ["ArrayView", "BlockOwner", "Export", "ExportLedger", "ExportOwner", "ExportToken", "Exporter"]
