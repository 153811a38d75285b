"""Two networks a client, one of them shared: PFedMoE, FML, FedKD, FedAPEN, FedMRL."""
