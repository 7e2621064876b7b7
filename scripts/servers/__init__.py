# SPDX-License-Identifier: Apache-2.0
"""vLLM servers that the commands start and stop themselves."""
