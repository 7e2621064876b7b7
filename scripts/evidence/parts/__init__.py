# SPDX-License-Identifier: Apache-2.0
"""One module for each part of the evidence."""
