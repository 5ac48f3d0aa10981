"""What `manage.py seed` puts on the shelves: texts that the shop can show in Korean, too."""

from __future__ import annotations

from typing import NamedTuple

from django.utils.translation import gettext_noop as _


class Item(NamedTuple):
    """The fields of a Product; the price is in cents."""

    slug: str
    category: str
    price: int
    stock: int
    name: str
    description: str


RACE = _("manage.py race_demo sells this one; its orders are cleared before every race.")
# fmt: off
ITEMS = [
    Item("espresso-machine", "Kitchen", 54900, 6,
         _("Espresso machine “Lever”"), _("Brass boiler, spring lever, no electronics to break.")),
    Item("moka-pot", "Kitchen", 3450, 40,
         _("Moka pot for six"), _("Aluminium, with a spare gasket.")),
    Item("cast-iron-pan", "Kitchen", 4995, 25,
         _("Cast-iron pan 28 cm"), _("Seasoned three times; outlives its owner.")),
    Item("chef-knife", "Kitchen", 12900, 12,
         _("Chef's knife 21 cm"), _("Carbon steel, walnut handle.")),
    Item("water-kettle", "Kitchen", 7900, 18,
         _("Water kettle 1.2 l"), _("Gooseneck spout for slow pouring.")),
    Item("desk-lamp", "Study", 8900, 15,
         _("Desk lamp “Monk”"), _("Balanced arm, warm light, 2700 K.")),
    Item("field-notebook", "Study", 1250, 120,
         _("Field notebook, three pieces"), _("Dotted, 48 pages each, thread-bound.")),
    Item("fountain-pen", "Study", 5600, 30,
         _("Fountain pen M"), _("Steel nib, refillable, ink window.")),
    Item("globe", "Study", 13900, 5,
         _("Relief globe 30 cm"), _("Mountains that fingers can find.")),
    Item("typewriter", "Study", 24900, 2,
         _("Portable typewriter, restored"), _("Built in 1964, new ribbon, QWERTY.")),
    Item("wool-blanket", "Home", 11900, 20,
         _("Wool blanket"), _("Merino, 140 × 200 cm, undyed.")),
    Item("wall-clock", "Home", 6400, 14,
         _("Wall clock 25 cm"), _("Silent sweep; keeps time without a server.")),
    Item("oak-stool", "Home", 9900, 9,
         _("Oak stool"), _("Three legs, so it never wobbles.")),
    Item("linen-towels", "Home", 4200, 50,
         _("Linen towels, set of four"), _("Woven in a mill from 1889.")),
    Item("rain-barrel", "Garden", 15900, 4,
         _("Rain barrel 100 l"), _("Oak staves, tap and lid.")),
    Item("pruning-shears", "Garden", 4800, 35,
         _("Pruning shears"), _("Forged; every part can be replaced.")),
    Item("seed-box", "Garden", 3900, 22,
         _("Seed box: 24 old vegetables"), _("Black carrots and blue potatoes among them.")),
    Item("bird-feeder", "Garden", 3400, 28,
         _("Bird feeder"), _("For tits and finches, not for squirrels.")),
    Item("concert-seats", "Tickets", 8500, 10,
         _("Concert: front row, Saturday"), _("Numbered seats that everybody wants at noon.")),
    Item("museum-night", "Tickets", 2900, 60,
         _("Night at the museum"), _("Torches are handed out, the whale sings.")),
    Item("race-locked", "Race", 1000, 10,
         _("Golden ticket, sold with a lock"), RACE),
    Item("race-naive", "Race", 1000, 10,
         _("Golden ticket, sold without a lock"), RACE),
]
