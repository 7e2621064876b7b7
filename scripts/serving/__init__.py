# SPDX-License-Identifier: Apache-2.0
"""Requests to a server with the OpenAI completions API: what is sent, how, and what came of it."""
