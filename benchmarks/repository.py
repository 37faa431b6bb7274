"""Imported for its effect: programs in this folder can import `tests.support` wherever they are started from."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
