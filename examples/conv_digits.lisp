;;; A small convolutional network on 8x8 images of handwritten digits.
;;; Shows `convolution` and `max-pool`, a layer made of layers, and a schedule with its own warmup.
;;;
;;;     sexpgpu run examples/conv_digits.lisp
(import "nn" "optim" "loss" "schedule")

(defknob channels 16 "channels of the first convolution; the second has twice as many" :min 1)
(defknob lr 3e-3 "peak learning rate")
(defknob batch 64 "samples in a step")
(defknob steps 500 "steps of the run")
(defknob seed 1 "seed of the run")
(defknob precision f32 "arithmetic" :one-of (f32 tf32 bf16 f64))

(defvariant tiny :channels 4 :batch 16 :steps 50)

(defdata digits
  (csv "data/digits.csv.gz"
       :fields ((image f32 [64] :scale 1/16)
                (label i32)))
  :split ((train 4/5) (valid 1/5)))

;; Half the height and width, `wide` channels.
(deflayer stage (x wide)
  (max-pool (relu (convolution x wide 3 :padding 1)) 2))

(deflayer network (image)
  (let* ((x (reshape image [(dim image 0) 1 8 8]))
         (x (stage x channels))
         (x (stage x (* 2 channels))))
    (linear (reshape x [(dim x 0) -1]) 10 :name "out")))

(defun digit-loss (image label)
  (cross-entropy (network image) label))

(defun digit-accuracy (image label)
  (accuracy (network image) label))

(defrun train
  :data (batches digits :split train :batch batch :shuffle true)
  :loss digit-loss
  :optimizer (adamw :lr (warmup-cosine :peak lr :warmup 20 :steps steps) :weight-decay 1e-2)
  :metrics ((accuracy digit-accuracy))
  :steps steps
  :seed seed
  :precision precision
  :checkpoint-every 100)

(defeval valid
  :data (batches digits :split valid :batch 128)
  :every 50
  :metrics ((loss digit-loss) (accuracy digit-accuracy)))
