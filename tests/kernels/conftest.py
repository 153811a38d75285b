"""The backend under test, and hypothesis: the same examples in every run, however slow."""

from hypothesis import HealthCheck, settings

from tests.kernels.backends import device

__all__ = ["device"]

settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    # `device` is the same for all examples of a test.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")
