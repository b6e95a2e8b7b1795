import pytest

from tests.forward.quantized_modules import calibrated_everything


@pytest.fixture
def everything():
    return calibrated_everything()
