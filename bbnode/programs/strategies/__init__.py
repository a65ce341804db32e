"""Strategies of federated training: each is `FederatedTraining` with other steps of a round."""
