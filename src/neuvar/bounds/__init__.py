"""PAC-Bayes and mutual-information bounds: formulas, and certificates for models."""

from neuvar.bounds.certificates import (
    Certificate,
    ForgettingCertificate,
    certify_forgetting,
    information,
    kl_to_prior,
    pac_bayes,
    zero_one,
)
from neuvar.bounds.formulas import (
    Bound,
    binary_kl,
    forgetting_bound,
    forgetting_information_bound,
    gaussian_kl,
    information_bound,
    inverse_kl,
    mcallester_bound,
    monte_carlo_risk,
    prior_sigma,
    seeger_bound,
    variability_bound,
)

__all__ = [
    "Bound",
    "Certificate",
    "ForgettingCertificate",
    "binary_kl",
    "certify_forgetting",
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
