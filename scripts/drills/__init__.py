# SPDX-License-Identifier: Apache-2.0
"""What the canary and the scan-limit search share: sessions, targets, verdicts, reports."""
