"""Servers below a cloud that train blocks of a model: FedBCD, FedBCD-I, CloudFedAvg."""
