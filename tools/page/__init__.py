# SPDX-License-Identifier: Apache-2.0
"""docs/results.md: numbers, tables and pictures from the raw JSON of the GPU evidence."""
