# SPDX-License-Identifier: Apache-2.0
"""Traces replayed through vLLM's real BlockPool, and what they are compared with."""
