# SPDX-License-Identifier: Apache-2.0
"""What the canary and the scan-limit search share: sessions, targets, verdicts, reports."""

import serving  # noqa: F401  # it says which packages are missing, before one is asked for
