# SPDX-License-Identifier: Apache-2.0
"""What gpu_evidence.py measures: servers side by side, cells, and the JSON they end up in."""
