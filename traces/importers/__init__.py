"""Foreign request traces and recorded runs, read into our own format with nothing lost in silence."""

from traces.importers.formats import FORMATS, NAMES
from traces.importers.importer import Imported, import_trace
from traces.importers.values import TIME_UNITS

__all__ = ["FORMATS", "NAMES", "TIME_UNITS", "Imported", "import_trace"]
