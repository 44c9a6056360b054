"""Networks: models that evaluate draft trees."""
