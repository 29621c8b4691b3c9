"""Which samples are held out for validation: decided by a sample's id alone, so it never changes with parts, order or profile."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def held_out(id_hash: npt.NDArray[np.uint64], share: float) -> npt.NDArray[np.bool_]:
    """Whether each sample belongs to `val`. Hashes are uniform, so a share of them lies below share x 2^64.

    A larger share holds out a superset of what a smaller one does.
    """
    return id_hash < np.uint64(min(int(share * 2**64), 2**64 - 1))
