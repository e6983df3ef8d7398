"""PAC-Bayes and mutual-information bounds, as functions of numbers and of models.

Functions of numbers: :func:`gaussian_kl`, :func:`prior_sigma`, :func:`binary_kl`,
:func:`inverse_kl`, :func:`monte_carlo_risk`, :func:`mcallester_bound`,
:func:`variability_bound`, :func:`seeger_bound`, :func:`information_bound`,
:func:`forgetting_bound`, :func:`forgetting_information_bound`.

Calls on a model and data: :func:`kl_to_prior`, :func:`pac_bayes`, :func:`information`,
:func:`forgetting`.
"""

from neuvar.bounds.divergence import (
    binary_kl,
    gaussian_kl,
    inverse_kl,
    monte_carlo_risk,
    prior_sigma,
)
from neuvar.bounds.formulas import (
    Bound,
    forgetting_bound,
    forgetting_information_bound,
    information_bound,
    mcallester_bound,
    seeger_bound,
    variability_bound,
)
from neuvar.bounds.models import (
    Certificate,
    ForgettingCertificate,
    forgetting,
    information,
    kl_to_prior,
    pac_bayes,
)
from neuvar.bounds.noisy import zero_one

__all__ = [
    "Bound",
    "Certificate",
    "ForgettingCertificate",
    "binary_kl",
    "forgetting",
    "forgetting_bound",
    "forgetting_information_bound",
    "gaussian_kl",
    "information",
    "information_bound",
    "inverse_kl",
    "kl_to_prior",
    "mcallester_bound",
    "monte_carlo_risk",
    "pac_bayes",
    "prior_sigma",
    "seeger_bound",
    "variability_bound",
    "zero_one",
]
