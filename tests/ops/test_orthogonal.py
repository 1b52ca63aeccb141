"""The initial value `orthogonal`: orthonormal, of a fixed stream, uniform in sign."""

import numpy as np
import pytest

from sexpgpu.ops.initial import initial_value


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (4, 2, 3, 3), (1, 1), (6, 1)])
def test_rows_or_columns_are_orthonormal(shape):
    value = initial_value("orthogonal", {"gain": 2.0}, shape, 11)
    assert value.shape == shape and value.dtype == np.float64
    matrix = value.reshape(shape[0], -1) / 2
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-6)


def test_large_ones_stay_orthogonal():
    value = initial_value("orthogonal", {}, (300, 300), 5)
    np.testing.assert_allclose(value @ value.T, np.eye(300), atol=1e-6)


def test_it_is_a_function_of_the_key():
    one, again, other = (initial_value("orthogonal", {}, (8, 16), key) for key in (3, 3, 4))
    assert np.array_equal(one, again) and not np.allclose(one, other)
    # fixed to the bit, as every initial value
    assert initial_value("orthogonal", {}, (2, 2), 1).astype(np.float32).tobytes().hex() == "98a7703fbd99ae3ebd99ae3e98a770bf"


def test_no_direction_is_preferred():
    first = np.stack([initial_value("orthogonal", {}, (4, 4), key)[0] for key in range(400)])
    assert np.abs(first.mean(0)).max() < 0.1 and np.abs((first**2).mean(0) - 0.25).max() < 0.05
