"""The shop's addresses."""

from django.urls import path

from . import race_views, views

urlpatterns = [
    path("", views.products, name="products"),
    path("pace/", views.pace, name="pace"),
    path("products/<int:pk>/", views.product, name="product"),
    path("products/<int:pk>/buy/", views.buy, name="buy"),
    path("products/<int:pk>/buy-naive/", views.buy_naive, name="buy-naive"),
    path("products/<int:pk>/restock/", views.restock, name="restock"),
    path("products/<int:pk>/discount/", views.discount, name="discount"),
    path("orders/", views.orders, name="orders"),
    path("orders/<int:pk>/", views.order, name="order"),
    path("orders/<int:pk>/pay/", views.pay, name="pay"),
    path("orders/<int:pk>/pay-naive/", views.pay_naive, name="pay-naive"),
    path("race/", race_views.races, name="races"),
    path("race/guide/", race_views.guide, name="race-guide"),
    path("race/<int:pk>/", race_views.race, name="race"),
    path("race/<int:pk>/cancel/", race_views.cancel, name="race-cancel"),
]
